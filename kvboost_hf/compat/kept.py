"""Things known of one model, kept on the model itself."""

from typing import Any, Self

from transformers import PreTrainedModel


class KeptOnModel:
    """Something known of one model, kept on the model itself, and never copied or saved with it."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The one on `model`, made at the first call."""
        key = f"_kvboost_hf_{cls.__name__}"
        kept = model.__dict__.get(key)  # first, for torch.compile traces this, and cannot make a lock
        if kept is None:
            kept = model.__dict__.setdefault(key, cls())
        assert isinstance(kept, cls)
        return kept

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copied or loaded model starts afresh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()
