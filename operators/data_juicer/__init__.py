"""Any Data-Juicer operator by its own name as a stage.

`index` and `source` read its source files without importing it; `base`, `stage`, `filtering`, `mapping` and `making` run one operator on a
batch whose `columns` they convert; `runtime` holds what touches the package itself, `over_ray` spreads a stage over a cluster, and
`recipe` unfolds a whole recipe into stages.
"""
