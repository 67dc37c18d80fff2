"""Figures with sliders, for JupyterLab. Each widget redraws one figure of this file, the static picture.

baseline_figure(p=0.3, b=0.0)              # a matplotlib Figure
baseline_widget()                          # the same with sliders for p and b
"""

from __future__ import annotations

import io

import numpy as np
import sympy as sp
import torch

from rlkit.jobs.plots import COLORS, figure
from rlkit.study import derivations


def _interactive(draw, name, **knobs):
    """An ipywidgets box: knobs, and below them the figure of ``draw``, drawn again when a knob moves."""
    import ipywidgets

    class Knobs(ipywidgets.VBox):
        def __repr__(self):  # what readers without a kernel see in its place
            return f"{name}: knobs for {', '.join(knobs)} (they need a running kernel)"

    picture = ipywidgets.Image(format="png")

    def redraw(_=None):
        buffer = io.BytesIO()
        draw(**{key: knob.value for key, knob in knobs.items()}).savefig(buffer, format="png")
        picture.value = buffer.getvalue()

    for knob in knobs.values():
        if hasattr(knob, "continuous_update"):
            knob.continuous_update = False  # one picture per released slider, not per pixel
        knob.observe(redraw, names="value")
    redraw()
    return Knobs([*knobs.values(), picture])


# ---- baselines and variance


def baseline_figure(p: float = 0.3, b: float = 0.0):
    """Variance per sample of (r - b) grad log pi, Bernoulli policy: against p (left) and b (right).

    p in (0, 1): success rate. b: the baseline. Curves are ``derivations.baseline_variance`` with n = 1.
    """
    variance = sp.lambdify(
        (derivations.p, derivations.b), derivations.baseline_variance().subs(derivations.n, 1)
    )
    fig, (left, right) = figure(1, 2, width=4.4, height=3.2)
    rates = np.linspace(0.001, 0.999, 400)
    left.plot(rates, variance(rates, 0 * rates), label="no baseline (a)")
    left.plot(rates, variance(rates, rates), label="mean reward, b = p (c)")
    left.plot(
        rates, variance(rates, b + 0 * rates), linestyle="--", color="0.5", label=f"constant, b = {b:.2f}"
    )
    left.axvline(2 / 3, color="0.7", linewidth=1)
    left.annotate("p = 2/3", (2 / 3, 0.108), ha="center", color="0.3")
    left.plot([p], [variance(p, b)], "o", color="black")
    left.set(xlabel="success rate p", ylabel="variance x n", ylim=(0, 0.16))
    left.legend(fontsize=8, loc="upper right")
    bases = np.linspace(-0.25, 1.25, 200)
    right.plot(bases, variance(p, bases), color=COLORS[2])
    marks = ((0.0, "none", COLORS[0]), (p, "mean", COLORS[1]), (1 - p, "best", COLORS[2]))
    for base, name, color in marks:
        right.plot([base], [variance(p, base)], "o", color=color, label=f"{name}: b = {base:.2f}")
    right.plot([b], [variance(p, b)], "x", color="black", markersize=8, label=f"yours: b = {b:.2f}")
    right.set(xlabel="baseline b", ylabel="variance x n", title=f"at p = {p:.2f}", ylim=(0, None))
    right.legend(fontsize=8)
    return fig


def baseline_widget():
    """Sliders for p and b over ``baseline_figure``. Look for the p at which the mean makes things worse."""
    import ipywidgets

    return _interactive(
        baseline_figure,
        "baseline_widget",
        p=ipywidgets.FloatSlider(0.3, min=0.02, max=0.98, step=0.02, description="p"),
        b=ipywidgets.FloatSlider(0.0, min=-0.25, max=1.25, step=0.05, description="b"),
    )


# ---- difficulty weights


def difficulty_figure(group_size: int = 8, normalizers=("none", "std", "mean"), advantage_eps: float = 1e-6):
    """Each normaliser's weight w_G(p) of a prompt with success rate p: solid for G, dotted for infinite G.

    Solid curves go through the library's ``compute_group_normalized_rewards`` (exact, over K = 0..G right
    answers).
    """
    fig, (ax,) = figure(width=5.6, height=3.6)
    rates = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    for i, normalizer in enumerate(normalizers):
        exact = derivations.measured_difficulty_weight(
            rates.tolist(), group_size, "mean", normalizer, advantage_eps
        )
        limit = sp.lambdify(derivations.p, derivations.difficulty_weight_limit(normalizer))
        ax.plot(rates, exact, color=COLORS[i], label=f"{normalizer}, G = {group_size}")
        ax.plot(rates, [float(limit(rate)) for rate in rates.tolist()], ":", color=COLORS[i], linewidth=1)
    ax.set(xlabel="success rate p", ylabel="weight of the prompt", ylim=(0, 8), xlim=(0, 1))
    ax.legend(title="dotted: G to infinity")
    return fig


def difficulty_widget():
    """Knobs for the group size, the normaliser and eps over ``difficulty_figure``."""
    import ipywidgets

    def draw(group_size, normalizer, log10_eps):
        return difficulty_figure(
            group_size, ("none", "std", "mean") if normalizer == "all" else (normalizer,), 10.0**log10_eps
        )

    return _interactive(
        draw,
        "difficulty_widget",
        group_size=ipywidgets.IntSlider(8, min=2, max=64, description="G"),
        normalizer=ipywidgets.ToggleButtons(options=("all", "none", "std", "mean"), description="divide by"),
        log10_eps=ipywidgets.IntSlider(-6, min=-6, max=0, description="log10 eps"),
    )


# ---- the clipped objective


def clip_figure(advantage: float = 1.0, cliprange: float = 0.2, ratio: float = 1.0):
    """The objective (left) and the factor of grad log pi (right) against w: PPO, no clip and CISPO.

    Both are measured on ``compute_policy_gradient_loss``, the right one by autograd. CISPO's objective is not
    drawn: its value means nothing, only its gradient does.
    """
    from rlkit.losses import compute_policy_gradient_loss

    ratios = torch.linspace(0.02, 2.0, 300, dtype=torch.float64)
    fig, (left, right) = figure(1, 2, width=4.4, height=3.2)
    for i, (method, name) in enumerate((("noclip", "no clip"), ("grpo", "PPO"), ("cispo", "CISPO"))):
        coefficient = derivations.measured_score_coefficient(method, advantage, ratios, cliprange)
        right.plot(ratios, coefficient, color=COLORS[i], label=name)
        if method != "cispo":
            loss, _ = compute_policy_gradient_loss(
                torch.full((300,), float(advantage), dtype=torch.float64),
                ratios.log()[:, None],
                method,
                torch.zeros(300, 1),
                cliprange,
            )
            left.plot(ratios, -loss.flatten(), color=COLORS[i], label=name)
    for ax in (left, right):
        ax.axvspan(1 - cliprange, 1 + cliprange, color="0.93", zorder=0)
        ax.axvline(ratio, color="black", linewidth=0.8)
        ax.set_xlabel("ratio w")
    left.set(ylabel="objective", title=f"A = {advantage:+.1f}")
    right.set(ylabel="factor of grad log pi", title="gradient")
    right.legend(fontsize=8)
    return fig


def clip_widget():
    """Knobs for the advantage, epsilon and a marked ratio over ``clip_figure``."""
    import ipywidgets

    return _interactive(
        clip_figure,
        "clip_widget",
        advantage=ipywidgets.FloatSlider(1.0, min=-2, max=2, step=0.5, description="A"),
        cliprange=ipywidgets.FloatSlider(0.2, min=0.0, max=0.8, step=0.05, description="epsilon"),
        ratio=ipywidgets.FloatSlider(1.0, min=0.05, max=2.0, step=0.05, description="w"),
    )
