"""From generated text to the parts of a message: reasoning, content, tool calls. Pure state machines over text.

Owns: what the formats of models look like, and the constraints that make tool calls certain. Does not own: tokens, JSON of the API, ids of
calls.
"""
