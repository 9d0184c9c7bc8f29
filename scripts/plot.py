"""Draw what scripts/bench measured, as the PNGs that the README shows.

python scripts/plot.py                                  # bench-results/bench.json to assets/
python scripts/plot.py --results FILE --assets FOLDER
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed to write files
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

Rows = list[dict[str, Any]]
Series = dict[str, dict[int, float]]
"""Values by tokens, by the name of who took them."""

# Blue is swapatch, orange is stock; apart for the colour-blind, and by marker and line when printed grey.
STYLES = {
    "stock": {"color": "#d95f02", "marker": "o", "linestyle": "-"},
    "stock other": {"color": "#e6a35c", "marker": "s", "linestyle": "--"},
    "swapatch": {"color": "#1f5fa8", "marker": "o", "linestyle": "-"},
    "swapatch other": {"color": "#7fb0e0", "marker": "s", "linestyle": "--"},
}


# ---------------------------------------------------------------------------------------------------------------------
# the figures


def prefill(rows: Rows) -> Figure | None:
    rows = [row for row in rows if row["case"] == "prefill" and row["dtype"] == "bfloat16"]
    wanted = ("stock sdpa", "swapatch", "stock sdpa, chunked", "swapatch, chunked")
    title = "Time of a whole prefill"
    chunk = next((row["setting"] for row in rows if row["setting"].startswith("prefill_chunk_size")), "none")
    note = f"chunked: {chunk}. A line that is not seen lies under another."
    return lines(rows, wanted, title, "prompt, tokens", "seconds", notes=note)


def memory(rows: Rows) -> Figure | None:
    rows = [row for row in rows if row["case"] == "memory"]
    title, note = "Peak memory of a one-shot prefill, above the weights", "One process for each point."
    return lines(rows, ("stock sdpa", "swapatch"), title, "prompt, tokens", "MiB", notes=note)


def decode(rows: Rows) -> Figure | None:
    rows = [row for row in rows if row["case"] == "decode" and row["setting"] == "one step"]
    rows = [row for row in rows if row["model"] == rows[0]["model"]]  # the first; the others are in the table
    wanted = ("stock dynamic", "swapatch anchored", "stock static", "swapatch static")
    title, note = "Time of one decode step", "Global layers attend the whole context, in stock and in swapatch."
    return lines(rows, wanted, title, "context, tokens", "milliseconds", scale=1e3, log=False, notes=note)


def layer(rows: Rows) -> Figure | None:
    """Ratios of one layer: over the length of a prefill, and of a decode step against each of stock's caches."""
    over_length = [row for row in rows if row["case"] == "layer-prefill" and row["ratio"]]
    steps = [row for row in rows if row["case"] == "layer-decode" and row["ratio"]]
    if not over_length and not steps:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 5), width_ratios=(1, 1.1))
    ratio_lines(left, over_length)
    ratio_bars(right, steps)
    note = (
        "Ratio: stock's time over swapatch's, above 1 swapatch is ahead. Masks are made outside of it, on both sides."
    )
    return finish(figure, "One sliding layer: how many times faster than stock", over_length + steps, note)


FIGURES: dict[str, Callable[[Rows], Figure | None]] = {
    "bench-prefill.png": prefill,
    "bench-memory.png": memory,
    "bench-decode.png": decode,
    "bench-layer.png": layer,
}


# ---------------------------------------------------------------------------------------------------------------------
# drawing


def lines(
    rows: Rows, wanted: tuple[str, ...], title: str, x: str, y: str, *, scale: float = 1, log: bool = True, notes: str
) -> Figure | None:
    """One line for each of the wanted names that has values; log-log, or with a linear height from 0."""
    found = {name: values for name, values in series(rows).items() if name in wanted}
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in wanted:
        values = sorted(found.get(name, {}).items())
        if values:
            plain = name in ("stock sdpa", "swapatch", "stock dynamic", "swapatch anchored")
            style = STYLES[name.split()[0].rstrip(",") + ("" if plain else " other")]
            axes.plot([at for at, _ in values], [value * scale for _, value in values], label=name, **style)
    label_tokens(axes, sorted({at for values in found.values() for at in values}), x)
    axes.set_ylabel(y)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.1 * scale * max(value for values in found.values() for value in values.values()))
    axes.legend(frameon=False)
    return finish(figure, title, rows, notes)


def series(rows: Rows) -> Series:
    """A way that is compared with several others is measured once, and found in several rows."""
    found: Series = {}
    for row in rows:
        for name, value in ((row["stock"], row["stock_value"]), (row["patched"], row["patched_value"])):
            if name and value:
                found.setdefault(name, {}).setdefault(row["tokens"], value)
    return found


def ratio_lines(axes: Axes, rows: Rows) -> None:
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    for setting, dtype in dict.fromkeys((row["setting"], row["dtype"]) for row in rows):
        color = (STYLES["swapatch"]["color"], "#1b9e77", "#7570b3")[settings.index(setting) % 3]
        style = {"color": color, **({} if dtype == "float32" else {"linestyle": "--"})}
        values = {row["tokens"]: row["ratio"] for row in rows if (row["setting"], row["dtype"]) == (setting, dtype)}
        at = sorted(values)
        label = f"{setting.rpartition(', D=')[0] or setting}, {dtype}"
        axes.plot(at, [values[tokens] for tokens in at], label=label, marker="o", **style)
    label_tokens(axes, sorted({row["tokens"] for row in rows}), "prompt, tokens")
    axes.set_ylim(bottom=0)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title("prefill, attention", fontsize=11)
    axes.set_ylabel("times faster")
    if rows:
        axes.legend(frameon=False, fontsize=9)


def ratio_bars(axes: Axes, rows: Rows) -> None:
    """One bar for each of stock's caches and each shape; the default layout, anchored."""
    rows = [row for row in rows if row["patched"] == "anchored"]
    colors = {"float32": STYLES["swapatch"]["color"], "bfloat16": STYLES["swapatch other"]["color"]}
    groups = list(dict.fromkeys((row["setting"].split(", D=")[0], row["stock"]) for row in rows))
    for offset, (dtype, color) in zip((-0.2, 0.2), colors.items(), strict=True):
        found = [row for row in rows if row["dtype"] == dtype]
        places = [groups.index((row["setting"].split(", D=")[0], row["stock"])) + offset for row in found]
        bars = axes.barh(places, [row["ratio"] for row in found], height=0.38, color=color, label=dtype)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.set_yticks(range(len(groups)), [f"{stock}\n{shape}" for shape, stock in groups], fontsize=9)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_title("decode step of the anchored layout, against", fontsize=11)
    axes.grid(axis="x", color="#dddddd")
    if rows:
        axes.legend(frameon=False, fontsize=9)


def label_tokens(axes: Axes, tokens: list[int], label: str) -> None:
    """A logarithmic axis with a tick where something was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{at:,}" for at in tokens])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.grid(color="#dddddd")


def finish(figure: Figure, title: str, rows: Rows, notes: str) -> Figure:
    """Title above, conditions below: a figure is seen without the text around it."""
    figure.suptitle(title, fontsize=13, fontweight="bold")
    for axes in figure.axes:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    width = int(figure.get_figwidth() * 15)
    caption = textwrap.fill(f"{conditions(rows)} {notes}", width)
    height = 0.035 * (caption.count("\n") + 1) + 0.02
    figure.text(0.5, 0.012, caption, ha="center", va="bottom", fontsize=9, color="#444444")
    figure.tight_layout(rect=(0, height, 1, 1))
    return figure


def conditions(rows: Rows) -> str:
    """What the rows of a figure were measured with."""

    def all_of(name: str) -> str:
        return " and ".join(dict.fromkeys(str(row[name]) for row in rows if row[name] != ""))

    versions = ", ".join(f"{name} {all_of(name)}" for name in ("torch", "transformers", "swapatch"))
    processors = all_of("cpu")
    return f"{all_of('model')}, {all_of('dtype')}, batch 1, {all_of('threads')} threads of {processors}, {versions}."


# ---------------------------------------------------------------------------------------------------------------------
# command line


def draw(results: Path, assets: Path) -> list[Path]:
    """All figures that there are rows for; returns what was written."""
    document = json.loads(results.read_text(encoding="utf-8"))
    assets.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in FIGURES.items():
        figure = make(document["rows"])
        if figure is None:
            print(f"{name}: nothing was measured for it")
            continue
        figure.savefig(assets / name, dpi=130)
        pyplot.close(figure)
        written.append(assets / name)
        print(assets / name)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(prog="plot", description="Draw what scripts/bench measured.")
    default = Path("bench-results", "bench.json")
    parser.add_argument("--results", metavar="FILE", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--assets", metavar="FOLDER", type=Path, default=Path("assets"), help="default: %(default)s")
    options = parser.parse_args()
    if not options.results.is_file():
        raise SystemExit(f"plot: there is no {options.results}; scripts/bench.sh makes it")
    draw(options.results, options.assets)


if __name__ == "__main__":
    main()
