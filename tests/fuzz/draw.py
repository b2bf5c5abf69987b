"""Draws histories: all of a seed, with lengths around the borders of chunks, pieces and windows."""

import random
from typing import Any

from tests.architectures.sizes import WINDOW
from tests.fuzz.families import FAMILIES, FULL, MOVABLE, STATEFUL
from tests.fuzz.history import CHANGES, COPIES, EDITS, EMBEDDINGS, MASKS, MODES, USERS, Call, History, Row

_MOST = 70  # tokens of a part of a row
_FIXED = 512
_OTHER_FORWARDS = {"draft", "prompt_lookup_num_tokens", "guidance_scale"}  # of several tokens, or of other prompts
_EOS = list(range(2, 30))  # so many that some row ends early


def draw_history(seed: int) -> History:
    """The history of a seed: the same each time."""
    return _Draw(random.Random(seed)).history()


class _Draw:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._chunk, self._piece = 16, 0

    def _one_in(self, n: int) -> bool:
        return self._draw.randrange(n) == 0

    def _of(self, choices: dict[Any, int]) -> Any:
        return self._draw.choices(list(choices), list(choices.values()))[0]

    def history(self) -> History:
        draw = self._draw
        self._blends = self._one_in(6)
        family = self._of(FAMILIES if not self._blends else {name: FAMILIES[name] for name in MOVABLE})
        self._stateful, self._windows = family in STATEFUL, family not in FULL
        self._copies = COPIES if family in FULL else COPIES[:2]  # as far as plain caches can be copied
        self._chunk = self._of({16: 4, 32: 1})
        self._pieces = self._of({1: 1, 3: 1, 7: 3, 8: 5, 15: 4, 16: 8, 17: 4, 24: 5, 32: 2, 33: 2})
        self._lengths = [self._length() for _ in range(4)]  # few, so that prompts begin alike and part in few places
        self._in_pieces = draw.random() < (0.7 if self._stateful else 0.5)
        self._batches = draw.random() < (0.8 if self._stateful else 0.4)
        reuse = self._of({"a new cache": 3, "a kept cache": 4, "attach": 4})
        threads = self._of({1: 12, 2: 1, 3: 1})
        if threads > 1 and self._one_in(4):
            reuse = "one cache for all threads"
        live = not self._blends and self._one_in(25)
        fixed = None
        if not live and not self._blends and not (self._stateful and not self._one_in(10)):
            fixed = self._of({None: 5, _FIXED: 5, "auto": 1})
        policy: dict[str, Any] = {"min_prefill_saving": 0} if self._blends or not self._one_in(8) else {}
        if self._blends:
            repair = draw.choice([{"repair": "query", "recompute_ratio": 1.0}, {"repair": "none", "sink_tokens": 0}])
            policy |= {
                "mode": "blend",
                **repair,
                "progressive": draw.choice([None, True, "ride", 1, 7, 24, 64, False]),
            }
            reuse = "a kept cache" if threads == 1 and not self._one_in(3) else reuse
        elif self._one_in(15) and fixed is None and not live:
            policy["keep_logprobs"] = True
        if policy and fixed is None and not live and not self._blends and self._one_in(10):
            policy |= draw.choice([{"reproducible": True}, {"audit_rate": 1.0}, {"weights_check": "full"}])
        self._sampled = threads == 1
        self._changes = threads == 1 and not self._blends and self._one_in(6)
        self._modes = threads == 1 and self._one_in(6)
        self._odd_inputs = self._one_in(5)
        self._users = threads == 1 and not self._blends and self._one_in(6)
        self._static = reuse == "attach" and self._one_in(4)
        attention = self._of({"eager": 3, "sdpa": 3, "kvboost_fa2": 1})
        self._hides = attention != "kvboost_fa2" or fixed is None  # whose fixed masks have a form of their own
        calls = tuple(self._call(reuse, threads, i) for i in range(draw.choice([1, 2, 2, 3, 3, 4]) * threads))
        return History(
            family=family,
            attention=attention,
            reuse=reuse,
            max_cache_len=fixed,
            live_quant=live,
            policy=policy,
            chunk_size=self._chunk,
            max_chunks=self._of({None: 9, 2: 1, 4: 1, 9: 1}),
            disk=self._one_in(10),
            threads=threads,
            calls=calls,
        )

    def _length(self) -> int:
        """Often at a border."""
        draw = self._draw
        if self._one_in(3):
            return draw.choice([1, 2, draw.randrange(3, 50)])
        unit = draw.choice([self._chunk] * 3 + [self._pieces] * 2 + [WINDOW])
        found = unit * draw.choice([1, 1, 1, 2, 2, 3]) + draw.choice([-1, 0, 0, 1, 1, 1, 2])
        return min(max(found, 1), _MOST)

    def _row(self) -> Row:
        draw = self._draw
        head = draw.choice(self._lengths) if not self._one_in(4) else self._length()
        tail = 0
        if self._one_in(3):  # texts part at a border, or the row ends at one
            tail = draw.choice(self._lengths)
            head, tail = (max(head - tail, 0), min(head, tail)) if self._one_in(2) else (head, tail)
        if self._blends and not self._one_in(4):  # the same behind other text
            return Row(text=draw.randrange(3), head=head, tail=draw.choice([33, 50, _MOST]))
        return Row(text=self._of({0: 6, 1: 2, 2: 1}), head=head, other=draw.choice([1, 2, 3]), tail=tail)

    def _call(self, reuse: str, threads: int, number: int) -> Call:
        draw = self._draw
        rows = draw.choice([2, 3, 3, 3, 4]) if self._batches and not self._one_in(3) else 1
        same = rows > 1 and self._one_in(4)  # as rows that begin alike
        one = self._row()
        made = [one if same and not self._one_in(3) else self._row() for _ in range(rows)]
        if rows > 1 and not same:  # one begins where others end, and one is known up to its last few tokens
            made[0] = Row(head=draw.randrange(1, 12), text=draw.randrange(3))
            made[1] = Row(head=self._chunk * draw.choice([1, 1, 2]) + draw.randrange(1, 9))
            draw.shuffle(made)
        follows = self._of({0: 4, 1: 5, 2: 1}) if number else 0
        before: list[str] = []
        if reuse == "a kept cache" and number and threads == 1 and self._one_in(4):
            before.append(draw.choice(["fork", "fork", "reset", "crop", "store_all", "store_tails"]))
        if reuse == "a kept cache" and number and threads == 1 and self._one_in(3 if self._blends else 40):
            before.append(draw.choice(["repair", *EDITS]))
        if number and self._one_in(12):
            before.append(draw.choice(["reopen", "collect"]) if threads == 1 else "store_tails")
        raises = nested = None
        if self._one_in(9):
            raises = draw.choice(["hook", "quiet hook", "processor", "criterion", "streamer"]), draw.choice([1, 2, 3])
        elif self._one_in(9) and threads == 1:
            nested = draw.choice(["processor", "criterion", "streamer"])
        if self._one_in(100):
            made = [Row()]
        only_new = follows > 0 and self._one_in(2)
        loop = rows == 1 and self._one_in(12) and raises is None is nested
        changed = mask = embeds = None
        if self._changes and self._one_in(2):
            changed = draw.choice(CHANGES), draw.choice([1, 2])
        if self._odd_inputs and self._one_in(2):
            mask = draw.choice(MASKS)
        within = draw.choice(MODES) if self._modes and self._one_in(2) else None
        options = self._options(rows) if not loop else {}
        if self._odd_inputs and self._one_in(3) and not loop and not only_new and "draft" not in options:
            embeds = draw.choice(EMBEDDINGS)
        user = None
        if self._users and self._one_in(2) and not loop and not options.keys() & _OTHER_FORWARDS:
            user = draw.choice([each for each in USERS if self._hides or each != "mask of steps"])
            if user == "mask of steps":  # what is given in pieces may end in one token
                options.pop("prefill_chunk_size", None)
                if self._windows:  # a column of a fixed window is another one with each token
                    options.pop("cache_implementation", None)
        return Call(
            rows=tuple(made),
            follows=follows,
            only_new=only_new,
            copied=draw.choice(self._copies) if only_new and reuse == "attach" and self._one_in(4) else None,
            loop=loop,
            new=draw.choice([1, 1, 2, 2, 3, 5]),
            options=options,
            before=tuple(before),
            raises=raises,
            nested=nested,
            mask=mask,
            embeds=embeds,
            within=within,
            changed=changed,
            user=user,
        )

    def _options(self, rows: int) -> dict[str, Any]:
        draw, told = self._draw, {}
        if self._in_pieces and not self._one_in(4):
            told["prefill_chunk_size"] = self._pieces
        way = self._of(
            {"greedy": 10, "sampled": 3 if self._sampled else 0, "beams": 3, "drafted": 4 if rows == 1 else 8}
        )
        if way == "drafted" and self._stateful and (rows == 1 or not self._one_in(4)):
            way = "greedy"
        if way == "sampled":
            told["do_sample"] = True
            if self._one_in(2):
                told["num_return_sequences"] = draw.choice([2, 3])
        elif way == "beams":
            told["num_beams"] = draw.choice([2, 3])
            told["num_return_sequences"] = draw.choice([1, 2])
        elif way == "drafted":
            kinds = ["plain", "load_assistant", "lookup", "trees", "prompt lookup"] if rows == 1 else ["trees"]
            kind = draw.choice([*kinds, "looked-up trees"])
            told |= {"prompt_lookup_num_tokens": draw.choice([2, 4])} if kind == "prompt lookup" else {"draft": kind}
        if self._one_in(8):
            told |= draw.choice([{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 2}])
        if self._one_in(8 if rows == 1 or way != "drafted" else 2):
            told |= {"eos_token_id": _EOS, "pad_token_id": 0}
        if self._one_in(12) and "draft" not in told:
            told["stop_strings"] = ["a", "e"]
        if self._one_in(12) and way == "greedy" and rows == 1:
            told["streamer"] = True
        if self._one_in(25) and way != "drafted":
            told["use_cache"] = False
        if self._one_in(25):
            told["guidance_scale"] = 1.5
        if self._one_in(20):
            told["output_scores"] = True
        if self._one_in(10):
            drafted = way == "drafted"  # transformers cannot split a choice of layers into tokens
            told["output_hidden_states"] = True if drafted else draw.choice([True, True, -1, [0, -1]])
        if self._static and not self._one_in(3):
            told["cache_implementation"] = "static"
        return told
