"""The attacks by name.

To add an attack: write a function `(signals) -> scores` in a new file, and add a line to ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.special import digamma, polygamma
from torch import Tensor

from ...errors import InputError

# -- What an attacker reads off a model: one number per record, in three forms, and the shadows they come from
#
#     margin  log p/(1 − p) of the true class (Carlini et al., "Membership Inference Attacks From First Principles",
#             arXiv 2112.03570v2, section IV-C)
#     raw     the logit of the true class, which the paper's own code attacks
#     log_p   log p of the true class
#
# All three are computed from logits by logsumexp, so that a probability near 1 loses no bits.

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Signals:
    """The signals of all shadow models. Every shadow is the target of all others.

    member              (shadows, records) which records each shadow was trained on
    margin, raw, log_p  (shadows, records) each
    population          (shadows, population) log_p of records that no shadow was trained on; 0 columns without any
    """

    member: BoolArray = field(repr=False)
    margin: Float32Array = field(repr=False)
    raw: Float32Array = field(repr=False)
    log_p: Float32Array = field(repr=False)
    population: Float32Array = field(repr=False)

    def __post_init__(self) -> None:
        if self.member.ndim != 2 or self.member.dtype != np.bool_:
            raise InputError(
                f"member has one row per shadow and one column per record, of type bool; got shape {self.member.shape} "
                f"of type {self.member.dtype}."
            )
        for name in ("margin", "raw", "log_p"):
            if getattr(self, name).shape != self.member.shape:
                raise InputError(
                    f"{name} must have the shape of member, {self.member.shape}; got {getattr(self, name).shape}."
                )
        if self.population.ndim != 2 or len(self.population) != len(self.member):
            raise InputError(
                f"population has one row per shadow, so {len(self.member)} rows; got shape {self.population.shape}."
            )

    def checked(self, name: str) -> Float32Array:
        """The signal `name` ("margin", "raw", "log_p", "population") of two or more shadows, all numbers finite.

        Raises InputError for a single shadow, which has no references, and for shadows that diverged in training.
        """
        values: Float32Array = getattr(self, name)
        if len(values) < 2:
            raise InputError(
                f"Every shadow is attacked with the others as its references, so it takes 2 or more; got {len(values)}."
            )
        diverged = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(diverged):
            raise InputError(
                f"The signal {name} must be finite; got others for {len(diverged)} of {len(values)} "
                f"shadows (the first is shadow {diverged[0]}). Their training diverged: lower the learning rate."
            )
        return values


def read_signals(logits: Tensor, targets: Tensor) -> dict[str, Float32Array]:
    """The three signals of each record, (…, records) each; logits (…, records, classes), targets (records,).

    >>> read_signals(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))["margin"]
    array([2., 0.], dtype=float32)
    """
    if logits.shape[-1] < 2:
        raise InputError(f"Signals need the logits of 2 or more classes, got {logits.shape[-1]}.")
    if logits.dim() == 2:
        return _read_model(logits.detach(), targets.to(logits.device).long())
    models = [read_signals(model, targets) for model in logits]  # one by one, because 64-bit copies of all are large
    return {name: np.stack([model[name] for model in models]) for name in ("margin", "raw", "log_p")}


def _read_model(logits: Tensor, targets: Tensor) -> dict[str, Float32Array]:
    true = targets[:, None]
    raw = logits.gather(-1, true)[:, 0].double()
    others = logits.double().scatter(-1, true, -torch.inf).logsumexp(-1)
    margin = raw - others
    values = {"margin": margin, "raw": raw, "log_p": F.logsigmoid(margin)}
    return {name: value.float().cpu().numpy() for name, value in values.items()}


# -- The references of each target: count, mean and variance of a signal over the other shadows, in and out
#
# Every shadow is the target of all others (leave-one-out). Sums over all shadows are made once; the sums without one
# target follow by subtraction, so a target costs O(records) in time and memory.
#
# A target's references do not depend on the target's own coins: the target's number is subtracted from the sum over
# members or from the sum over non-members, and what remains are sums over the other shadows. So without a signal a
# score is independent of the coin, if coins are independent. If instead exactly half of the shadows had each record,
# the number of references in and out would reveal the target's coin.
#
# The same must hold to the last bit. Where shadows have equal signals, scores that should be equal would otherwise be
# ordered by rounding, which depends on the coin: in a test without a signal the AUC was 10 standard errors from one
# half.
# So the summands are rounded to a grid on which their sums and differences are exact.

FloatArray = npt.NDArray[np.float64]

#: A variance below this part of the sum of all squared deviations is rounding, and counts as 0.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of a signal over one target's references of one kind (in or out), (records,) each.

    count     number of references
    mean      without meaning where there is no reference
    variance  unbiased; 0 where there are fewer than 2 references, or where they are equal
    """

    count: FloatArray
    mean: FloatArray
    variance: FloatArray

    @property
    def freedom(self) -> FloatArray:
        """Degrees of freedom of the variance, (records,)."""
        return np.maximum(self.count - 1, 0)

    def pooled_variance(self) -> float:
        """One variance for all records, weighted by degrees of freedom; 1 if the references show no spread at all."""
        pooled = float(self.freedom @ self.variance) / max(float(self.freedom.sum()), 1.0)
        return pooled if pooled > 0 else 1.0


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over shadows of one kind, (records,) each: their number, their deviations from a centre, the squares."""

    count: FloatArray
    first: FloatArray
    second: FloatArray

    def without(self, present: BoolArray, deviation: FloatArray, square: FloatArray) -> _Sums:
        return _Sums(self.count - present, self.first - present * deviation, self.second - present * square)

    def moments(self, centre: FloatArray, rounding: FloatArray) -> Moments:
        mean = self.first / np.maximum(self.count, 1)
        variance = (self.second - self.first * mean) / np.maximum(self.count - 1, 1)
        return Moments(self.count, centre + mean, np.where(variance > rounding, variance, 0.0))


#: Scores of one target, (records,), from its own signal, (records,), and its references in and out.
Rule = Callable[[FloatArray, Moments, Moments], FloatArray]


def score_targets(signal: Float32Array, member: BoolArray, rule: Rule) -> Float32Array:
    """The scores that `rule` gives each target, (shadows, records); signal, member (shadows, records)."""
    return collect((rule(own, inside, outside) for own, inside, outside in leave_one_out(signal, member)), member.shape)


def collect(rows: Iterable[FloatArray], shape: tuple[int, ...]) -> Float32Array:
    """Rows of scores as one array in 32 bits. Numbers beyond the range of 32 bits become its ends."""
    scores, largest = np.empty(shape, np.float32), float(np.finfo(np.float32).max)
    for target, row in enumerate(rows):
        scores[target] = np.clip(row, -largest, largest)
    return scores


def leave_one_out(
    signal: Float32Array, member: BoolArray, transform: Callable[[FloatArray], FloatArray] = np.positive
) -> Iterator[tuple[FloatArray, Moments, Moments]]:
    """For each target its own signal, (records,), and the moments of its references in and out.

    signal, member  (shadows, records)
    transform       applied first to every row of the signal, in 64 bits
    """

    def rows() -> Iterator[FloatArray]:
        return (transform(row.astype(np.float64)) for row in signal)

    def deviations() -> Iterator[tuple[FloatArray, FloatArray]]:
        for row in rows():
            deviation = _on_grid(row - centre, grid)
            yield deviation, _on_grid(np.square(deviation), square_grid)

    centre, largest = _centre(rows(), signal.shape)
    # Sums of multiples of 2^m that stay below 2^(m + 53) are exact.
    grid, square_grid = (np.spacing(2 * len(signal) * values) for values in (largest, np.square(largest)))
    inside, outside = _sums(deviations(), member), _sums(deviations(), ~member)
    rounding = _ROUNDING * (inside.second + outside.second)
    for own, (deviation, square), present in zip(rows(), deviations(), member, strict=True):
        yield (
            own,
            inside.without(present, deviation, square).moments(centre, rounding),
            outside.without(~present, deviation, square).moments(centre, rounding),
        )


def _centre(rows: Iterable[FloatArray], shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """The mean over all shadows, in and out, so that it depends on no coin, and a bound on deviations from it."""
    total, low, high = np.zeros(shape[1]), np.full(shape[1], np.inf), np.full(shape[1], -np.inf)
    for row in rows:
        total += row
        low, high = np.minimum(low, row), np.maximum(high, row)
    return total / shape[0], high - low


def _on_grid(values: FloatArray, grid: FloatArray) -> FloatArray:
    """`values` rounded to multiples of `grid`, (records,), powers of 2."""
    rounded: FloatArray = np.rint(values / grid) * grid
    return rounded


def _sums(rows: Iterable[tuple[FloatArray, FloatArray]], present: BoolArray) -> _Sums:
    count = present.sum(axis=0, dtype=np.float64)
    first, second = np.zeros((2, len(count)))
    for (deviation, square), here in zip(rows, present, strict=True):
        first += here * deviation
        second += here * square
    return _Sums(count, first, second)


# -- LiRA, the likelihood ratio attack, on every shadow as the target of all others
#
# Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership Inference Attacks From First Principles", arXiv 2112.03570v2.
# The signal of a record is taken as normal, N(μ_in, σ_in²) over models trained with the record and N(μ_out, σ_out²)
# over models trained without it. Its score under a target is
#
#     online   log N(s; μ_in, σ_in²) − log N(s; μ_out, σ_out²)     (Algorithm 1)
#     offline  (s − μ_out)/σ_out, increasing in the paper's Pr[N(μ_out, σ_out²) < s], without references in
#
# A variance is the record's own, or fixed (the paper's global variance): one σ_in² and one σ_out² for all records,
# pooled about the means of each record. Fixed variances are better with few references. The signal is the margin;
# `lira_raw` reads the logit of the true class instead.
#
# Where references in or out are missing, or fewer than the 2 that an own variance needs, the score is 0: no evidence.

#: With so many shadows, 256 in and 256 out on average, own variances find more members at a low false positive rate.
OWN_FROM = 512

#: An own variance is at least this part of the pooled one.
_LEAST_VARIANCE = 1e-6


def lira(signals: Signals) -> Float32Array:
    """Online, with own variances from 512 shadows, with fixed ones from fewer."""
    rule = _online_own if len(signals.member) >= OWN_FROM else _online_fixed
    return score_targets(signals.checked("margin"), signals.member, rule)


def _online_fixed(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    ratio = _log_density(own, inside.mean, inside.pooled_variance())
    ratio -= _log_density(own, outside.mean, outside.pooled_variance())
    return np.where(np.minimum(inside.count, outside.count) >= 1, ratio, 0.0)


def _online_own(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    ratio = _log_density(own, inside.mean, _own_variance(inside))
    ratio -= _log_density(own, outside.mean, _own_variance(outside))
    return np.where(np.minimum(inside.count, outside.count) >= 2, ratio, 0.0)


def _offline(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    standardised = (own - outside.mean) / np.sqrt(outside.pooled_variance())
    return np.where(outside.count >= 1, standardised, 0.0)


def _own_variance(moments: Moments) -> FloatArray:
    return np.maximum(moments.variance, _LEAST_VARIANCE * moments.pooled_variance())


def _log_density(value: FloatArray, mean: FloatArray, variance: FloatArray | float) -> FloatArray:
    """log N(value; mean, variance), without the constant that cancels in ratios."""
    density: FloatArray = -0.5 * (np.square(value - mean) / variance + np.log(variance))
    return density


# -- Shrunk LiRA: the online likelihood ratio with few references, by empirical Bayes. It is ours, and the default
#
# With 60 references a record's own variance and its own shift (mean in minus mean out) are mostly noise, and one
# variance for all records (Carlini et al., arXiv 2112.03570v2) is wrong for most. Both are shrunk here: the estimate of
# each record moves towards the mean over records, the further the noisier it is. For one record under one target, with
# n_in and n_out references, means m_in and m_out, and s² the variance about them, on ν = n_in + n_out − 2 degrees of
# freedom:
#
# 1. Scale, one for in and out. If signals are normal with variance σ², then ℓ = log s² − ψ(ν/2) + log(ν/2) has mean
#    log σ² and variance τ = ψ'(ν/2) (digamma and trigamma; Smyth, Statistical Applications in Genetics and Molecular
#    Biology 3(1), 2004, article 3, section 6.2). Let log σ² vary over records with mean g and variance A. By moments,
#    g = mean of ℓ and A = max(0, variance of ℓ − mean of τ), over records. The best linear estimate is
#
#        log σ̂² = g + (ℓ − g)·A/(A + τ)
#
# 2. Shift. d = (m_in − m_out)/σ̂ has variance t = 1/n_in + 1/n_out about the record's shift. Let shifts vary with
# mean μ
#    and variance B = max(0, variance of d − mean of t). Then
#
#        δ = μ + (d − μ)·B/(B + t)
#
# 3. Score. Location comes from all references: their mean m is estimated from n_in + n_out numbers, not from half of
#    them. With x = (s − m)/σ̂ for the target's signal s, and the share r = n_in/(n_in + n_out), the shift puts the
#    means
#    in and out at (1 − r)·δ and −r·δ, so the log likelihood ratio of unit normals is
#
#        δ·(x − (½ − r)·δ)
#
# g, A, μ, B are moments over all records of one target's references, so they do not depend on the target either. Where
# a record has no usable estimate (ν = 0, s² = 0, or no reference of one kind), it gets the mean over records.


def _shrunk(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    scale = _scale(inside, outside)
    shift = _shift(inside, outside, scale)
    total = inside.count + outside.count
    location = (inside.count * inside.mean + outside.count * outside.mean) / total
    return shift * ((own - location) / scale - shift * (0.5 - inside.count / total))


def _scale(inside: Moments, outside: Moments) -> FloatArray:
    """σ̂ of each record, (records,)."""
    freedom = inside.freedom + outside.freedom
    within = inside.freedom * inside.variance + outside.freedom * outside.variance
    usable = within > 0
    half = np.where(usable, freedom, 1.0) / 2
    levels, place = np.unique(half, return_inverse=True)  # few: all references are in or out
    log_variance = np.log(np.where(usable, within, 1.0) / (2 * half)) - (digamma(levels) - np.log(levels))[place]
    return np.exp(shrink(log_variance, polygamma(1, levels)[place], usable) / 2)


def _shift(inside: Moments, outside: Moments, scale: FloatArray) -> FloatArray:
    """δ of each record, (records,)."""
    usable = np.minimum(inside.count, outside.count) >= 1
    noise = 1 / np.maximum(inside.count, 1) + 1 / np.maximum(outside.count, 1)
    return shrink((inside.mean - outside.mean) / scale, noise, usable)


def shrink(estimate: FloatArray, noise: FloatArray, usable: BoolArray) -> FloatArray:
    """Each estimate moved towards the mean by the share of noise in its variance; the mean itself where not usable.

    estimate, noise  (records,) estimates and their variances
    usable           (records,) which estimates count; without any, the result is 0
    """
    if not usable.any():
        return np.zeros(len(estimate))
    mean = float(estimate[usable].mean())
    spread = max(0.0, float(estimate[usable].var() - noise[usable].mean()))
    return np.where(usable, mean + (estimate - mean) * spread / (spread + noise), mean)


# -- RMIA, the robust membership inference attack, on every shadow as the target of all others
#
# Zarifzadeh, Liu, Shokri, "Low-Cost High-Power Membership Inference Attacks", arXiv 2312.03262v3. A record x is
# compared with records z of a population that no model was trained on. With p the target's probability of the true
# class and p̄ its mean over reference models, the score is the share of the population with
#
#     (p(x)/p̄(x)) / (p(z)/p̄(z)) ≥ γ
#
#     online   p̄(x) = (mean in + mean out)/2; of a population record, the mean over all references, which are all out
#     offline  p̄ = ((1 + a)·mean out + 1 − a)/2, for mean in is put at a·(mean out) + 1 − a
#
# γ is 1 here: under one target the score is a monotone function of p(x)/p̄(x) whatever γ is, so γ only moves the
# threshold. For the same reason the population does not change the order of records under one target, and makes the
# scores of different targets comparable. A share has ties, without which no false positive rate below 1/population
# could be measured: the share is therefore interpolated linearly in log(p/p̄) between the population's records, and
# continues with slope 1 beyond them. p is the plain softmax probability.
#
# The offline constant a is not tuned on the target: it is (1 − p in)/(1 − p out), each averaged over records, among the
# target's references.

#: Added to p and to p̄, so that a probability that vanishes has a finite ratio.
_LEAST = 1e-12

#: From a target's references: p̄ of the records, (records,), and p̄ of the population from its mean, (population,).
_Reference = Callable[[Moments, Moments, FloatArray], tuple[FloatArray, FloatArray]]


def _rmia(signals: Signals, reference: _Reference) -> Float32Array:
    log_p, population = signals.checked("log_p"), signals.checked("population")
    if not population.shape[1]:
        raise InputError(
            "RMIA compares records with a population that no shadow is trained on; got no population. Give one, such "
            "as test data, or choose other attacks."
        )

    def rows() -> Iterator[FloatArray]:
        targets = zip(leave_one_out(log_p, signals.member, np.exp), _population(population), strict=True)
        for (own, inside, outside), (own_z, mean_z) in targets:
            mean, mean_z = reference(inside, outside, mean_z)
            yield _share(_log_ratio(own, mean), np.sort(_log_ratio(own_z, mean_z)))

    return collect(rows(), log_p.shape)


def _population(log_p: Float32Array) -> Iterator[tuple[FloatArray, FloatArray]]:
    """For each target its own p of the population, and the mean p of the other shadows, (population,) each."""
    out = np.zeros((1, log_p.shape[1]), np.bool_).repeat(len(log_p), axis=0)
    return ((own, outside.mean) for own, _, outside in leave_one_out(log_p, out, np.exp))


def _online(inside: Moments, outside: Moments, population: FloatArray) -> tuple[FloatArray, FloatArray]:
    mean_in, mean_out = _means(inside, outside)
    return (mean_in + mean_out) / 2, population


def _rmia_offline(inside: Moments, outside: Moments, population: FloatArray) -> tuple[FloatArray, FloatArray]:
    a, (_, mean_out) = _constant(inside, outside), _means(inside, outside)
    return ((1 + a) * mean_out + 1 - a) / 2, ((1 + a) * population + 1 - a) / 2


def _means(inside: Moments, outside: Moments) -> tuple[FloatArray, FloatArray]:
    """Means in and out. Where there are references of one kind only, their mean is both."""
    mean_in = np.where(inside.count > 0, inside.mean, outside.mean)
    return mean_in, np.where(outside.count > 0, outside.mean, inside.mean)


def _constant(inside: Moments, outside: Moments) -> float:
    """a, between 0 and 1, from the records that have references of both kinds; 1 if there are none."""
    both = np.minimum(inside.count, outside.count) >= 1
    missing_in, missing_out = 1 - inside.mean[both], 1 - outside.mean[both]
    return float(np.clip(missing_in.sum() / missing_out.sum(), 0, 1)) if missing_out.sum() > 0 else 1.0


def _log_ratio(own: FloatArray, mean: FloatArray) -> FloatArray:
    ratio: FloatArray = np.log((own + _LEAST) / (np.maximum(mean, 0) + _LEAST))
    return ratio


def _share(ratio: FloatArray, population: FloatArray) -> FloatArray:
    """The share of `population` (sorted) that is at most `ratio`, interpolated between and continued beyond."""
    ranks = np.arange(1, len(population) + 1) / len(population)
    beyond = ratio - np.clip(ratio, population[0], population[-1])
    share: FloatArray = np.interp(ratio, population, ranks) + beyond
    return share


# -- The attacks by name

#: An attack gives every shadow, as the target of all others, one score per record, (shadows, records) in 32 bits. A
#: higher score is evidence for "member". A score must not depend on the target's own coins, which are to be guessed.
Attack = Callable[[Signals], Float32Array]


def _by(signal: str, rule: Rule) -> Attack:
    """The attack that scores each target's signal of this name by a rule."""
    return lambda signals: score_targets(signals.checked(signal), signals.member, rule)


ATTACKS: Mapping[str, Attack] = {
    "lira": lira,
    "lira-offline": _by("margin", _offline),
    "lira-fixed": _by("margin", _online_fixed),
    "lira-shrunk": _by("margin", _shrunk),
    "lira-raw": _by("raw", _online_own),  # the code of the paper on Sample and Scale
    "rmia": lambda signals: _rmia(signals, _online),
    "rmia-offline": lambda signals: _rmia(signals, _rmia_offline),
    # Yeom, Giacomelli, Fredrikson, Jha, "Privacy Risk in Machine Learning", arXiv 1709.01604v5, Adversary 2: the
    # score is −loss = log p of the true class. It needs no references, and the statistics cover every threshold.
    "loss": lambda signals: signals.checked("log_p").copy(),  # the negative loss
}

DEFAULT_ATTACKS = ("lira-shrunk", "rmia")

#: Attacks that refuse signals without a population.
POPULATION_ATTACKS = frozenset({"rmia", "rmia-offline"})
