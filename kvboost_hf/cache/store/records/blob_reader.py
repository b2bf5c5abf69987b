"""Reads K/V and states of one model from the blobs of lower tiers."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from transformers import PreTrainedModel

from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.kv.column_format import ColumnFormat
from kvboost_hf.cache.kv.layer_kv import LayerKV, LayerStates
from kvboost_hf.cache.kv.model_form import ModelForm, read_kv, read_states
from kvboost_hf.cache.store.records.history import remember
from kvboost_hf.cache.tiers.base import Kind
from kvboost_hf.cache.tiers.record import Blob, DamagedBlobError
from kvboost_hf.compat import cache_layers, key_rotation, known_reason


class BlobReader:
    """Knows the forms that K/V of a model has had under each root, and the format that columns are kept in.

    Args:
        model: Gives the model.
        codec: Of the store.
    """

    def __init__(self, model: Callable[[], PreTrainedModel], codec: Codec) -> None:
        self._model, self.codec = model, codec
        self._format: tuple[Codec, ColumnFormat] | None = None  # of the codec
        self._first_form: ModelForm | None = None
        self._kinds: OrderedDict[bytes, tuple[bytes, bool]] = OrderedDict()  # by root, see `note_root`
        self._forms: OrderedDict[tuple[bytes, bool], ModelForm | None] = OrderedDict()  # by kind

    @property
    def column_format(self) -> ColumnFormat:
        """The format of columns."""
        if self._format is None or self._format[0] is not self.codec:
            model = self._model()
            rotation = key_rotation(model) if not self.codec.lossless else "not needed"
            known = rotation if not isinstance(rotation, str) else None
            layers = len(cache_layers(model)) if not self.codec.lossless else None
            self._format = self.codec, ColumnFormat(self.codec, known, layers)
        return self._format[1]

    def look_at_model(self) -> None:
        """Find out now what form the K/V of the model has, which takes a moment."""
        model = self._model()
        self._first_form = ModelForm.of(model) if known_reason(model) is None else None

    def note_root(self, root: bytes, fingerprint: bytes, *, keeps_hidden: bool) -> None:
        """Remember which fingerprint of the model a root is of, and whether hidden states are kept under it."""
        remember(self._kinds, root, (fingerprint, keeps_hidden))

    def read(self, blob: Blob, root: bytes) -> LayerKV | LayerStates | None:
        """The K/V or the states in a blob, or None where the form that they should have is not known.

        Raises:
            DamagedBlobError: if they have another form.
        """
        damage: DamagedBlobError | None = None
        for form in self.forms(root):
            try:
                if blob.entry.kind is Kind.STATES:
                    return read_states(blob, form)
                return read_kv(blob, self.column_format, form)
            except DamagedBlobError as error:
                damage = error
        if damage is not None:
            raise damage
        return None

    def forms(self, root: bytes) -> Iterator[ModelForm]:
        """The form as the model was at first, then, where it may have changed since, as it is."""
        kind = self._kinds.get(root)
        if kind is None:
            return  # nothing of it is in a lower tier
        if kind not in self._forms:
            _, keeps_hidden = kind
            if self._first_form is not None and not keeps_hidden:
                yield self._first_form
            remember(self._forms, kind, ModelForm.of(self._model(), keeps_hidden=keeps_hidden))
        if (form := self._forms[kind]) is not None:
            yield form
