"""The one authority on how token ids become text.

Owns: the bytes and class of every id (`table`), building and verifying that table from a tokenizer.json (`build`), incremental
decoding with hold-back (`decoding`), and stop-string matching on the tokens' bytes (`stopping`).
Does not own: encoding, chat templates, or the decision that a match ends a request (the scheduler's).
"""
