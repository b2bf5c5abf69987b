"""`KnownTools`: gives lists of tools that are equal as JSON in one order of keys, so that their prompts are equal."""

import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any

from kvboost_hf.server.chats.token_cache import Owner

_MOST, _MOST_OF_ONE = 256, 16  # lists of all owners, and of one
_MOST_CHARS = 2**19  # of a list that is remembered


class KnownTools:
    """The lists of tools that each owner has sent, in the order of keys in which they came first. Safe for threads.

    Clients that keep schemas in maps without an order send the same tools in another order after each start. Tools
    stand at the beginning of prompts, so that nothing behind them would be found.

    Example:
        >>> known, owner = KnownTools(), (b"key", b"salt")
        >>> known.ordered([{"name": "look", "type": "function"}], owner)
        ([{'name': 'look', 'type': 'function'}], False)
        >>> known.ordered([{"type": "function", "name": "look"}], owner)
        ([{'name': 'look', 'type': 'function'}], True)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By owner and a hash of what does not depend on the order, those used last at the end.
        self._lists: OrderedDict[tuple[Owner, bytes], str] = OrderedDict()

    def ordered(self, tools: list[dict[str, Any]], owner: Owner) -> tuple[list[dict[str, Any]], bool]:
        """Tools in the order of keys in which their owner has sent them first, and whether that is another one.

        Args:
            tools: As chat templates take them. The order of lists in them counts, and stays.
            owner: Who asks. Nothing is known of the lists of others.
        """
        given = json.dumps(tools)
        if not tools or len(given) > _MOST_CHARS:
            return tools, False
        key = owner, hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
        with self._lock:
            first = self._lists.setdefault(key, given)
            self._lists.move_to_end(key)
            own = [each for each in self._lists if each[0] == owner]
            if len(own) > _MOST_OF_ONE:
                del self._lists[own[0]]
            if len(self._lists) > _MOST:
                self._lists.popitem(last=False)
        return (tools, False) if first == given else (json.loads(first), True)
