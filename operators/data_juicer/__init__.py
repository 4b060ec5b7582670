"""Any Data-Juicer operator by its own name as a stage.

`catalogue` (with catalogue.json) says what each operator takes, reads and finds, without importing Data-Juicer; `arguments` checks values by it.
`base` is what all stages share; `stage` runs filters, mappers, deduplicators and selectors, `groupers` and `aggregators` the others. `columns` and
`images` convert what a batch holds, `runtime` is all that touches the package itself, `over_ray` spreads a stage over a cluster, and `recipe`
unfolds a whole recipe into stages.
"""
