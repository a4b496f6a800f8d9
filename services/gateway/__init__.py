"""The gateway: HTTP in, server-sent events out.

Owns: OpenAI's API (types, validation, errors, chunks), admission against the scheduler's window, the client's connection and its end,
the only durable copy of a live request (prompt, output so far, seed), the root span and the request's log line.
Does not own: tokens' bytes (libs.text), rendering and encoding (the tokenizer service), any ending of an accepted request (the scheduler).
It is stateless across restarts and knows nothing of the model but what the session's welcome and the text table say.

    app > api/ (types, validate, chat, completions, ops, errors) > generate (one request's life) > session > tickets
                                                                   generate > tokenizer_client, admission, streamer, record
"""
