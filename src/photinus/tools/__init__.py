"""The commands that look at a run or at a machine. They never import torch: the ranks that they start do.

view/    `photinus top` and `photinus report`
doctor/  `photinus doctor`: what works here, found by trying it
verify   `photinus verify`: do two runs have the same bits
bench    `photinus bench`: how fast collectives are here
"""
