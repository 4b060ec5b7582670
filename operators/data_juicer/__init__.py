"""Any Data-Juicer operator by its own name as a stage.

`index`, `source` and `arguments` read its source files without importing it: names, columns, statistics, types. `base` is what all stages share;
`stage` runs filters, mappers, deduplicators and selectors (`filtering`, `mapping`, `making`), `grouping` and `aggregating` the others.
`columns` and `images` convert what a batch holds, `runtime` is all that touches the package itself, `over_ray` spreads a stage over a
cluster, and `recipe` unfolds a whole recipe into stages.
"""
