"""Twenty prompts for tests of exactness: 1 to 1,500 tokens, code, numbers, several languages, emoji."""

from __future__ import annotations

_LOOM = (
    "A loom weaves many threads at once, one row per step. The warp is held under tension while the weft passes between, "
    "and the pattern is only ever decided one row ahead. "
)
_CODE = """def quicksort(items):
    if len(items) < 2:
        return items
    pivot, rest = items[0], items[1:]
    return quicksort([x for x in rest if x < pivot]) + [pivot] + quicksort([x for x in rest if x >= pivot])
"""

# Text and, where a number stands, how many tokens of the repeated text to keep.
PROMPTS: list[tuple[str, int | None]] = [
    ("The", None),
    ("Once upon a time", None),
    ("The capital of France is", None),
    ("1, 1, 2, 3, 5, 8, 13, 21,", None),
    ("3.14159265358979323846264338327950288", None),
    ("Shopping list:\n\n1. Milk\n2. Bread\n3.", None),
    (_CODE + "\ndef mergesort(items):\n", None),
    ('{"name": "Ada", "born": 1815, "fields": ["mathematics", "', None),
    ("SELECT customer_id, SUM(amount) FROM orders WHERE", None),
    ("Der schnelle braune Fuchs springt über den faulen Hund. Übersetzung:", None),
    ("Le métier à tisser était au centre de la pièce, et", None),
    ("El telar es una máquina que", None),
    ("织布机是一种", None),
    ("機織りの歴史は", None),
    ("Ткацкий станок — это", None),
    ("I love this! 😀🎉 So much fun 🚀🚀", None),
    ("    \n\n\t  indented    text with   odd   spaces\r\n", None),
    (_LOOM * 8, 200),
    (_LOOM * 30 + _CODE, 700),
    ("Chapter 1\n\n" + (_LOOM + _CODE) * 40, 1500),
]
