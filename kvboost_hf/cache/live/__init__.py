"""The K/V that a cache holds now, and the record of the tokens behind it."""
