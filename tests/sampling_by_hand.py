"""The distribution that a token is drawn from, a row at a time, in float64 NumPy, by sorting: the reference of ``Sampling``."""

import numpy as np


def softmax(x):
    unscaled = np.exp(x - x.max())
    return unscaled / unscaled.sum()


def leading(score, weight, limit):
    """Which entries are left: by falling score, then rising index, as long as the weight of those before is below ``limit``."""
    keep, before = np.zeros(len(score), bool), 0.0
    for i in sorted(range(len(score)), key=lambda i: (-score[i], i)):
        keep[i] = before < limit
        before += weight[i]
    return keep


class Row:
    """Logits that pass through the methods of a ``Sampling``.

    ``margin``: the least distance of any number that is compared with another from equality, but for numbers that are equal in
    any precision. Where it is below a float32's rounding, float32 may decide otherwise.
    """

    def __init__(self, logits):
        self.x, self.margin = np.array(logits, np.float64), np.inf

    def penalise(self, s, prompt, generated):
        for token in {*prompt, *generated}:
            divided = self.x[token] > 0
            self.x[token] *= 1 / s.repetition_penalty if divided else s.repetition_penalty
        for token in generated:
            self.x[token] -= s.frequency_penalty
        for token in set(generated):
            self.x[token] -= s.presence_penalty

    def hold_back(self, s, new, eos):
        for token, number in s.logit_bias:
            self.x[token] += number
        self.x[list(s.banned)] = -np.inf
        if new < s.min_new_tokens:
            self.x[list(eos)] = -np.inf

    def cut(self, score, weight, limit):
        """Keeps the ``leading`` ones."""
        keep = leading(score, weight, limit)
        order = sorted(np.flatnonzero(weight > 0), key=lambda i: (-score[i], i))
        before = np.cumsum([0.0, *weight[order]])[1:-1]
        dropped = [score[i] for i in order if not keep[i]]
        gaps = [*np.abs(before - limit), *(score[keep][:, None] - np.array(dropped)).ravel()]
        self.near(gap for gap in gaps if gap != 0)
        self.x[~keep] = -np.inf

    def near(self, gaps):
        self.margin = min(self.margin, *map(abs, gaps), np.inf)

    def top_k(self, k):
        if k:
            self.cut(self.x, (self.x > -np.inf).astype(float), k)

    def top_p(self, p):
        if p < 1:
            self.cut(self.x, softmax(self.x), max(p, 1e-300))

    def min_p(self, p):
        ratio = softmax(self.x) / softmax(self.x).max()
        self.near(ratio[ratio < 1] - p if p else [])
        self.x[ratio < p] = -np.inf

    def typical_p(self, p):
        if p < 1:
            mass = softmax(self.x)
            surprise = -np.log(mass, where=mass > 0, out=np.full(mass.shape, -np.inf))
            entropy = (mass[mass > 0] * surprise[mass > 0]).sum()
            nearness = np.where(mass > 0, -np.abs(surprise - entropy), -np.inf)
            self.cut(nearness, mass, max(p, 1e-300))


def distribution(logits, s, prompt=(), generated=(), eos=()):
    """Probabilities [V], and the margin of ``Row``, for the next token after ``prompt`` and ``generated``."""
    row = Row(logits)
    row.penalise(s, prompt, generated)
    row.hold_back(s, len(generated), eos)
    if s.transform is not None:
        row.x = np.asarray(s.transform(row.x), np.float64)
    if s.temperature == 0:
        best = row.x.argmax()
        row.near(gap for gap in row.x[best] - row.x[row.x > -np.inf] if gap != 0)
        return np.eye(len(row.x))[best], row.margin
    row.x = row.x / s.temperature
    for method in ("top_k", "top_p", "min_p", "typical_p"):
        getattr(row, method)(getattr(s, method))
    return softmax(row.x), row.margin
