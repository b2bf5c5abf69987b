"""A tensor that grows in place, and notices writes of others.

Whoever gets a view of its buffer can write to it. A `GrowingTensor` counts its own writes and compares that with
PyTorch's version counter, which a buffer shares with its views. What is handed out to readers of a layer's `keys` and
`values` has a checksum besides, for `.data` and NumPy write past the counter; the next write leaves that buffer to
them, as stock layers do.
"""

from collections.abc import Callable, Iterator, Sequence
from math import gcd, prod

import torch

from kvboost_hf.cache.layers.base import Piece
from kvboost_hf.checksum import checksum

# Room beyond what is needed at a (re)allocation: an eighth, at least this many columns.
_MIN_SLACK = 128
# Each head begins at a multiple of so many bytes: else matrix products round otherwise from one capacity to the next.
_ALIGNED_BYTES = 64
_Form = tuple[int, torch.Size, tuple[int, ...], bool]


def capacity(length: int) -> int:
    """Columns that a buffer for `length` of them is given."""
    return length + max(_MIN_SLACK, length // 8)


class GrowingTensor:
    """A tensor [batch, heads, columns, dim] that grows along its columns, in a buffer with room to spare.

    `room` tells how many columns a buffer for so many is given.
    """

    __slots__ = (
        "_given",
        "_seen",
        "_taken",
        "_uncounted",
        "_version",
        "buffer",
        "first",
        "room",
        "shared",
        "stop",
        "tampered",
    )

    def __init__(self, room: Callable[[int], int] = capacity) -> None:
        self.room = room
        self.buffer: torch.Tensor | None = None  # columns [first, first + capacity)
        self.first = 0
        self.stop = 0
        self.shared = False  # somebody else reads the same buffer: copy before the next write
        self._taken = False  # the buffer's memory has those of other layers, too
        self._version = 0  # of the buffer after our last write; below 0 if it has none
        self.tampered = False  # somebody else has written to it
        self._uncounted = False  # a graph has: its writes are ours, but not counted one by one
        self._seen: tuple[torch.Tensor, bytes] | None = None  # what was handed out, and its checksum
        self._given: tuple[torch.Tensor, _Form] | None = None  # the same, as the reader has it

    def view(self, start: int = 0) -> torch.Tensor:
        """Columns from `start`, or from the first one held, on."""
        assert self.buffer is not None
        held = self.stop - self.first
        begin = min(max(start - self.first, 0), held)
        return self.buffer.narrow(2, begin, held - begin)

    def row(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of a row, as far as they are held."""
        assert self.buffer is not None
        end = min(stop, self.stop) - self.first
        begin = min(max(start - self.first, 0), end)
        return self.buffer[row].narrow(1, begin, end - begin)

    def append(self, new: torch.Tensor, keep_from: int = 0) -> None:
        """Append [batch, heads, m, dim]; columns before `keep_from` may go if the buffer is full."""
        self.follow()
        held, self.stop = self.stop, self.stop + new.shape[2]
        self.make_writable(new, held, keep_from)
        assert self.buffer is not None
        self.buffer.narrow(2, held - self.first, self.stop - held).copy_(new)
        self.seal()

    def append_and_view(self, new: torch.Tensor, keep_from: int, start: int) -> torch.Tensor:
        """As `append`, then `view`. In one step where the buffer is ours alone and has room.

        Each layer does this for each token, so that it calls as little as it can.
        """
        if torch.is_grad_enabled():  # something else may need a gradient through what is returned
            self.append_with_graph(new)
            return self.view(start)
        buffer, first, held = self.buffer, self.first, self.stop
        columns = new.shape[2]
        stop = held + columns
        if (
            torch.compiler.is_compiling()  # first: what is read while compiling is looked at before each call
            or buffer is None
            or self.shared
            or self._seen is not None
            or self._uncounted
            or stop - first > buffer.shape[2]
            or self._version < 0
            or type(self) is not GrowingTensor
        ):
            self.append(new, keep_from)
            return self.view(start)
        if self._version != buffer._version:
            self.tampered = True
        buffer[:, :, held - first : stop - first] = new
        self._version, self.stop = buffer._version, stop
        begin = min(max(start - first, 0), stop - first)
        return buffer.narrow(2, begin, stop - first - begin)

    def open(self, stop: int, like: torch.Tensor) -> torch.Tensor:
        """Make room for columns up to `stop` of [batch, heads, _, dim]; returns the new ones.

        They are to be written to, and `seal` to be called then.
        """
        held, self.stop = self.stop, stop
        self.make_writable(like, held, self.first)
        assert self.buffer is not None
        return self.buffer[:, :, held - self.first : stop - self.first]

    def scatter(self, columns: torch.Tensor, new: torch.Tensor) -> None:
        """Write [batch, heads, m, dim] over `columns` [batch, m], which are held."""
        self.make_writable(new, self.stop, self.first)
        assert self.buffer is not None
        at = (columns - self.first)[:, None, :, None].expand(new.shape)
        self.buffer.scatter_(2, at, new.detach())
        self.seal()

    def append_with_graph(self, new: torch.Tensor) -> None:
        """Append out of place, as stock layers do: autograd must keep every earlier version."""
        self.follow()
        self.note_changes()
        if self.stop > self.first:
            new = torch.cat([self.view(), new], dim=2)
        self.stop = self.first + new.shape[2]
        self._replace(new, shared=True)  # an in-place append would corrupt the graph

    def fill(
        self,
        start: int,
        stop: int,
        rows: Sequence[Sequence[torch.Tensor]],
        turn: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Make columns [start, stop) the last ones, from the pieces [heads, length, dim] of each row."""
        like = next(piece for pieces in rows for piece in pieces)
        if start > self.stop:  # what is held does not reach: begin anew
            self.buffer, self.first, self.stop = None, start, start
        opened = self.open(stop, like.expand(len(rows), -1, -1, -1))
        for row, pieces in enumerate(rows):
            write_behind_padding(opened[row], pieces)
        if turn is not None:
            turn(opened)
        self.seal()

    def take(self, buffer: torch.Tensor, stop: int) -> None:
        """Hold columns [0, stop) of a buffer from `buffers_for`, which has them already."""
        self.first, self.stop = 0, stop
        self.buffer, self.shared, self._taken, self._seen, self._given = buffer, False, True, None, None
        self._version, self._uncounted = buffer._version, False

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        self.stop = max(min(self.stop, length), self.first)

    def trim(self, keep_from: int) -> bool:
        """Give back memory if columns before `keep_from` take most of the buffer; tells whether it did."""
        if self.buffer is None or self.room(self.stop - keep_from) * 2 >= self.buffer.shape[2]:
            return False
        if self.buffer.requires_grad:  # a copy would cut the graph: a view, as stock layers keep
            self.buffer = self.buffer[:, :, keep_from - self.first : self.stop - self.first]
            self.first = keep_from
        else:
            self._reallocate(self.buffer, self.stop, keep_from)
        return True

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.follow()
        if self.buffer is not None:
            self.note_changes()
            # The spare columns move too: cheaper than an append that has to grow again.
            with torch.inference_mode(False):
                self._replace(self.buffer.index_select(0, rows.to(self.buffer.device).clone()))

    def cast(self, dtype: torch.dtype) -> None:
        """Before an append of this dtype: hold what is held in one that both fit into, as `torch.cat` would."""
        if self.buffer is not None and self.buffer.dtype != dtype:
            self.follow()
            self.note_changes()
            self._replace(self.buffer.to(torch.promote_types(self.buffer.dtype, dtype)))

    def move(self, device: torch.device) -> None:
        """Move the buffer."""
        if self.buffer is not None and self.buffer.device != device:
            self.note_changes()
            self._replace(self.buffer.to(device))

    def share(self) -> "GrowingTensor":
        """One that reads the same buffer; whichever of the two writes first copies."""
        twin = GrowingTensor(self.room)
        self.follow()
        self.note_changes()
        twin.buffer, twin.first, twin.stop = self.buffer, self.first, self.stop
        twin._version, twin.tampered, twin._taken = self._version, self.tampered, self._taken
        if self._seen is not None:  # somebody has a view, and what they do is not for both
            assert self.buffer is not None
            twin._reallocate(self.buffer, self.stop, self.first)
        else:
            self.shared = twin.shared = True
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, room to spare included."""
        if self.buffer is None:
            return 0
        return self.buffer.nbytes if self._taken else self.buffer.untyped_storage().nbytes()

    def make_writable(self, like: torch.Tensor, held: int, keep_from: int) -> None:
        """Make room for columns up to `stop` in a buffer that nobody else reads."""
        if not torch.compiler.is_compiling():
            self.note_changes()
        if (
            self.buffer is None
            or self.shared
            or self._seen is not None
            or self.buffer.shape[2] < self.stop - self.first
        ):
            self._reallocate(like, held, min(keep_from, held))

    # What others may do to it

    @property
    def intact(self) -> bool:
        """Whether nobody else has written to what is held, or put something else in its place."""
        buffer = self.buffer
        if buffer is not None and (
            self._uncounted or self._version < 0 or self._version != buffer._version or self._seen is not None
        ):
            self.follow()
            self.note_changes()
        return not self.tampered

    def seal(self) -> None:
        """Everything that was written to the buffer so far is ours."""
        if torch.compiler.is_compiling():  # what is set here is set each time that the graph has run
            self._uncounted = True
        elif self.buffer is not None:
            self._version, self._uncounted = version_of(self.buffer), False

    def note_changes(self) -> None:
        """Look whether somebody else has written to the buffer, before we do."""
        if self.buffer is None:
            return
        if self._uncounted:
            self.seal()
        elif self._version != version_of(self.buffer):
            self.tampered = True
        if self._seen is not None and checksum([self._seen[0]]) != self._seen[1]:
            self.tampered = True

    def follow(self) -> None:
        """Hold what somebody has made of the tensor that was handed out: other memory (`set_`, `.data`), or a part."""
        given = self._given
        if given is None or (form := _form(given[0])) == given[1]:
            return
        if given[0].ndim != 4:
            self.tampered = True
        else:
            self.adopt(given[0], self.stop + form[1][2] - given[1][1][2])

    def hand_out(self, start: int) -> torch.Tensor:
        """Columns from `start` on, for somebody who may do anything with them, up to our next write.

        The same tensor until then, as stock layers have it.
        """
        self.follow()
        if self.shared or self._taken:  # with others, whom it would reach
            assert self.buffer is not None
            self.note_changes()
            self._reallocate(self.buffer, self.stop, self.first)
        view = self.view(start)
        if self._seen is None or self._seen[0].shape[2] < view.shape[2]:
            whole = self.view()
            self.note_changes()
            self._seen = whole.detach(), checksum([whole])
        form = _form(view)
        if self._given is None or self._given[1] != form:
            self._given = view, form
        return self._given[0]

    def adopt(self, new: torch.Tensor, stop: int) -> None:
        """Hold [batch, heads, columns, dim] that somebody else has put here, and that end at a column."""
        self.stop, self.first = stop, stop - new.shape[2]
        self._replace(new, shared=True)
        self.tampered = True

    def _replace(self, buffer: torch.Tensor, *, shared: bool = False) -> None:
        """Go on with another buffer."""
        self.buffer, self.shared, self._taken, self._seen, self._given = buffer, shared, False, None, None
        self.seal()

    def _reallocate(self, like: torch.Tensor, held: int, keep_from: int) -> None:
        first = max(self.first, keep_from)
        # What is compiled cannot ask whether it is in inference mode.
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            # Outside inference mode: a buffer made inside could not be appended to outside it.
            with torch.inference_mode(False), torch.no_grad():
                grown = self._grown(like, held, first)
        else:
            grown = self._grown(like, held, first)
        self.first = first
        self._replace(grown)

    def _grown(self, like: torch.Tensor, held: int, first: int) -> torch.Tensor:
        """A buffer for columns [first, stop), with a copy of those before `held`."""
        batch, heads, _, dim = like.shape
        columns = _aligned(self.room(self.stop - first), dim * like.element_size())
        kept = None
        if self.buffer is not None and held > first:
            kept = self.buffer[:, :, first - self.first : held - self.first]
        dtype = like.dtype if kept is None else torch.promote_types(like.dtype, kept.dtype)  # see `cast`
        grown = torch.empty((batch, heads, columns, dim), dtype=dtype, device=like.device)
        if kept is not None:
            grown[:, :, : held - first].copy_(kept)
        return grown


def _form(tensor: torch.Tensor) -> _Form:
    """What tells a tensor from another one that its name may be given to: its memory, shape and strides."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.requires_grad


def _aligned(columns: int, nbytes: int) -> int:
    """Columns of so many bytes each, rounded up so that heads behind each other are aligned."""
    step = _ALIGNED_BYTES // gcd(_ALIGNED_BYTES, nbytes)
    return -(-columns // step) * step


def buffers_for(
    count: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, at_once: int
) -> Iterator[tuple[range, torch.Tensor]]:
    """Make buffers for `count` tensors of a shape (batch, heads, columns, dim), with room to spare, not zeroed.

    So many are made together as take `at_once` bytes at most, unless it is only one: yields which, and their buffers
    [tensors, batch, heads, columns and room, dim].
    """
    batch, heads, columns, dim = shape
    one = (batch, heads, _aligned(capacity(columns), dim * dtype.itemsize), dim)
    step = max(1, at_once // max(1, prod(one) * dtype.itemsize))
    for start in range(0, count, step):
        run = range(start, min(start + step, count))
        with torch.inference_mode(False):  # see `GrowingTensor`
            made = torch.empty((len(run), *one), dtype=dtype, device=device)
        yield run, made


def write_behind_padding(out: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Write pieces [heads, length, dim] to the end of [heads, columns, dim], and zeros before them."""
    padding = out.shape[1] - sum([piece.shape[1] for piece in pieces])
    if padding:
        out.narrow(1, 0, padding).zero_()
        out = out.narrow(1, padding, out.shape[1] - padding)
    if len(pieces) == 1:
        out.copy_(pieces[0])
    elif pieces:
        torch.cat(list(pieces), dim=1, out=out)


def write_row(opened: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
    """Write the pieces of a row to the end of the columns that a layer has opened for it, and zeros before them.

    `opened` are the new columns of each tensor of the layer, [heads, columns, dim].
    """
    for at, out in enumerate(opened):
        write_behind_padding(out, [piece[at] for piece in pieces])


def version_of(tensor: torch.Tensor) -> int:
    """PyTorch's count of in-place writes to a tensor and its views; those made in inference mode have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1
