"""Individual accounting with own budgets: each record is charged for its own gradients, and stops at its own budget.

An experiment and no part of the library: the loop here is for one small model, and at equal accounting it gains nothing
(experiments/pages/individual-accounting.md). Feldman and Zrnic, "Individual Privacy Accounting via a Rényi Filter",
arXiv 2008.11193; Koskela, Tobaben and Honkela, "Individual Privacy Accounting with Gaussian Differential Privacy",
arXiv 2209.15596; the paper, section 5 and appendix "Integrating Privacy Accounting and Assignment", extends the first
one by own budgets. The promises are those of real numbers: rounding in 32-bit sums is not covered.

    gaussian.py   the exact profile of the Gaussian mechanism: the accountant of full batches
    filters.py    who may contribute how much in the next step
    loop.py       softmax regression under a filter
    histories.py  what a record spent, computed again from its bounds, without the prices
    cells.py      the kind of cell
    page.py       the table of differences, and the figure
"""
