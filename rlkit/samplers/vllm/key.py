"""Loaded by vLLM's API server: every request, whatever its path, needs the key that only its owner knows.

vLLM's own ``--api-key`` leaves /collective_rpc, /sleep and the other development routes, which hand over
weights, open to every user of the machine. The server has a copy of this file on its path, named by
``--middleware``; the key is in its environment, which other users cannot read.
"""

import os
import secrets


class RequireKey:
    """ASGI middleware: 401 without the header ``Authorization: Bearer <RLKIT_VLLM_KEY>``."""

    def __init__(self, app):
        self.app, self.wanted = app, f"Bearer {os.environ['RLKIT_VLLM_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(given, self.wanted):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"the key is missing or wrong"})
