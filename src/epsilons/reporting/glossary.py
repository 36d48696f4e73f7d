"""The words of a report, each in one plain sentence. A page explains those that it uses."""

from __future__ import annotations

from .content import Content

_ALWAYS = (
    (
        "ε",
        "The limit on what anyone can learn about one member of the list: no conclusion about them becomes more than "
        "e^{ε} times as likely because their data were used. Smaller protects more.",
    ),
    ("δ", "A small probability with which that limit may fail, such as 1 in 100,000."),
    ("budget", "The ε (and δ) that was promised. Each tier is a group of members with the same budget."),
    ("plan", "The table, fixed before training, of how often members are drawn and how much noise is added."),
    ("ledger", "The file that counts the training steps, each before it is made, so that none is forgotten."),
    ("release", "Everything that leaves the training: the model, and every noisy update that made it."),
)
_NUMBERS = (
    ("sample_rate", "The chance of one member to be drawn in one training step, by an independent coin (Poisson)."),
    ("clip_norm", "The largest length of one member’s contribution to a step; a longer one is shortened to it."),
    ("noise", "Random numbers added to every step. noise_multiplier compares them with a member’s contribution."),
    ("influence", "How far one member can move the model over the whole training, compared with the noise."),
)
_PLD = (
    "PLD",
    "Privacy loss distribution: a method that adds up the privacy loss of all steps exactly, and rounds up.",
)
_RDP = ("RDP", "Rényi differential privacy: a method that adds up the privacy loss of all steps, and rounds up.")
_PHILOX = ("Philox", "A generator of random numbers that are computed from the run’s secret key.")
_CHACHA = ("ChaCha20", "A cipher; here it makes random numbers from the run’s secret key.")
_SETS = (
    "Pr[M(D)∈S]",
    "The probability that the training M with the data D releases one of the results in the collection S. The "
    "statement holds for every collection, so for every question that one could ask.",
)
_INTERVAL = ("95 % interval", "The range of accuracies that fit the size of the test set (Wilson’s interval).")
_AUC = ("AUC", "How often an attacker tells a person in the data from one outside: 0.5 is guessing, 1 is always.")


def words_of(content: Content) -> tuple[tuple[str, str], ...]:
    """(word, meaning) of those that the page uses."""
    bound = str(content.made_with.get("accountant", ""))
    source = str(content.made_with.get("randomness", ""))
    chosen = [
        (True, _ALWAYS),
        (content.phases is not None, _NUMBERS),
        ("PLD" in bound, (_PLD,)),
        ("RDP" in bound, (_RDP,)),
        ("Philox" in source, (_PHILOX,)),
        ("ChaCha20" in source, (_CHACHA,)),
        ("Pr[" in content.guarantee, (_SETS,)),
        (content.accuracy is not None, (_INTERVAL,)),
        (content.membership is not None, (_AUC,)),
    ]
    return tuple(word for is_used, words in chosen if is_used for word in words)
