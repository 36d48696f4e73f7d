"""Individualized PATE: teachers vote on public records, and a looser budget buys a heavier vote.

An experiment and no part of the library. Papernot et al., "Scalable Private Learning with PATE", arXiv 1802.08908v1;
Boenisch et al., "Individualized PATE", arXiv 2202.10517; the paper, section 5 and appendix "Comparison to
Individualized Privacy with IPATE". Here the costs are exact and do not depend on the votes: a record belongs to one
teacher, whose vote of weight w moves two counts by w, so K votes are K Gaussian mechanisms of sensitivity √2·w.

    costs.py           weighting, upsampling and vanishing as plans of the library
    teachers.py        data, and teachers that are each trained on records of one group
    votes.py           weighted counts, noise, labels
    data_dependent.py  the cost as published. It depends on the votes, so it is private itself
    published.py       the weights of the published code
    cells.py           the kinds of cell
    page.py            the tables of the results page
"""
