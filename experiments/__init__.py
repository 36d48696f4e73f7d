"""The paper's tables and figures on real data, beside the library: imports epsilons, is never imported by it.

    python -m experiments list                      # what there is, and how much of it has been run
    python -m experiments run table_2 momentum      # runs what is missing; interrupt it and call it again
    python -m experiments report                    # docs/results.md and docs/results-figures.md

tables/*.toml     one file per table or figure: [defaults], and one [[run]] per cell
expected/*.json   the paper's numbers for those cells, with their spread, and what is claimed of them
results/*.jsonl   one line per finished run, recognised by a hash of its settings

To add a table: a file in tables/ (and one in expected/). To add a kind of cell: a function and a line in cells.KINDS.
"""
