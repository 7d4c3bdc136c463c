"""Ways of exchanging gradients that give other bits than one process: compressed, asynchronous,
local SGD.
"""
