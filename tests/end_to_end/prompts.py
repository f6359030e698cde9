"""Ten varied prompts: prose, code, numbers, dialogue, another script, JSON, control characters, repetition."""

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: Why is the sky blue?\nA:",
    "水は高いところから",
    '{"name": "Ada", "age": 36, "languages": [',
    "😀 emoji and\ttabs\n\n\n",
    "It was the best of times, it was the worst of times, it was the age of wisdom, " * 6,
]
