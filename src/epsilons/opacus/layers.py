"""Opacus' layers, where Opacus is installed. Models with nn.LSTM and the like need none of them."""

from __future__ import annotations

try:
    from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, RenameParamsMixin, SequenceBias
except ImportError as error:
    raise ImportError(
        "epsilons.opacus.layers are the layers of Opacus, which is not installed: pip install 'opacus>=1.6,<1.7'. Or "
        "use nn.LSTM, nn.GRU, nn.RNN and nn.MultiheadAttention, which can be trained as they are."
    ) from error

__path__: list[str] = []  # deeper paths are in import_paths.py
__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention", "RenameParamsMixin", "SequenceBias"]
