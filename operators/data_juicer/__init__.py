"""Data-Juicer operators as stages, under their own names.

`catalogue` (with catalogue.json) lists each operator's arguments, columns and results without importing Data-Juicer; `arguments` checks values
against it. `base` is common to all stages. `stage` runs filters, mappers, deduplicators and selectors; `groupers` and `aggregators` run the others.
`columns` and `images` convert the contents of a batch. `runtime` is the only module that uses the package itself. `over_ray` distributes a stage
over a cluster, and `recipe` expands a whole recipe into stages.
"""
