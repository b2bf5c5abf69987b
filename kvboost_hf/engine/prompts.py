"""Built-in prompts to check a model with."""

_PASSAGES = (
    "The old harbour lies on the north side of the bay, and a lighthouse of red brick stands at its mouth. ",
    "Every spring the carpenters mend the boats, while the nets are hung over the fences to dry in the wind. ",
    "The school is behind the market, next to a well that has not been used for a hundred years. ",
)
_ORDERS = ((0, 1, 2), (0, 1, 2), (0, 2, 1))

CHECK_PROMPTS = tuple(6 * "".join(_PASSAGES[at] for at in order) + "What is behind the market?" for order in _ORDERS)
