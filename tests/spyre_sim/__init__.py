"""A stand-in for torch-spyre, to prove swapatch's Spyre path where there is no card.

* `operator`: `spyre::sliding_window_attention` with its contract checked, for CPU tensors and for the simulated device.
* `device`: a simulated device `spyre` in host memory, with real Inductor code generation.
* `support`: the table of what the card runs eagerly, in a graph, by the CPU, or not at all.
* `layouts`, `eager`, `compiled`: parts of `device`, which offers what tests need of them.
* `graphs`: counts of the graphs that torch.compile makes and of their calls.
"""
