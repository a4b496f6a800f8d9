"""OpenAI's API over HTTP.

Owns: request types and their validation, responses and chunks, error bodies, operational endpoints, the client's connection.
Does not own: how a request is admitted, encoded, submitted and read; that is `services.gateway.generate`.
"""
