"""Hugging Face's Trainer, with a budget for every record.

`PrivateTrainer(…, budgets="epsilon")` takes the place of `transformers.Trainer(…)`, and `PrivateSeq2SeqTrainer` that of
`Seq2SeqTrainer`. Their page is
docs/doors/huggingface.md.
"""

from ..errors import InputError

try:
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as _error:
    raise InputError(
        "epsilons.huggingface needs the libraries transformers and accelerate: "
        "pip install 'transformers>=5.6' 'accelerate>=1.10'."
    ) from _error

from .model_losses import per_record_loss
from .trainer import PrivateSeq2SeqTrainer, PrivateTrainer

__all__ = ["PrivateSeq2SeqTrainer", "PrivateTrainer", "per_record_loss"]
