"""Time and memory of stock transformers and of swapatch, measured in turn in one process.

    python scripts/bench                            # everything: bench-results/bench.json and bench.csv
    python scripts/bench --only layer-prefill decode
    python scripts/bench --device cuda              # on a GPU: what can be measured there, in a few minutes
    python scripts/bench --quick                    # toy sizes: shows that it works, not how fast anything is

A ratio is stock's time (or memory) over swapatch's: above 1 swapatch is ahead. It is the median of the ratios of single
rounds, and each round runs every way once, so that a machine that is busy for a while slows all of them alike. Before
anything is timed the ways must have computed the same.

There is a module for each thing that is measured. :mod:`bench.cases` lists them; they share :mod:`bench.sizes` (how
large everything is), :mod:`bench.models`, :mod:`bench.layer` (one layer's attention), :mod:`bench.checks`,
:mod:`bench.timing`, :mod:`bench.peak` (memory), :mod:`bench.device` (a CPU, a GPU), and :mod:`bench.rows` and
:mod:`bench.table` (what comes out).
"""
