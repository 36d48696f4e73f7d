"""The paper's tables and figures on real data. This package imports epsilons; epsilons never imports it.

    python -m experiments list                      # the tables, their finished runs, and the hours of the missing ones
    python -m experiments run table_2 momentum      # the missing runs; after an interruption, call it again
    python -m experiments queue                     # all that queue.txt lists, in its order
    python -m experiments report                    # docs/results.md and docs/results-figures.md

tables/*.toml     one file per table or figure: [defaults], and one [[run]] per cell
expected/*.json   the paper's numbers for those cells, with their spread, and claims
results/*.jsonl   one line per finished run, with a hash of its settings as id
protocol.toml     the tuning of all methods on each data set (protocol.py): "protocol_mnist" and so on, for `run`
queue.txt         what is run, in which order

To add a table: a file in tables/ (and one in expected/). To add a kind of cell: a function and a line in cells.KINDS.
"""
