"""The dialect's part of the OpenAPI document."""

from __future__ import annotations

from dgpp_core.server.messages.bodies import MessageBody, MessageError, MessageTokens
from dgpp_core.server.messages.events import EVENTS
from dgpp_core.server.messages.requests import CountMessagesRequest, MessagesRequest
from dgpp_core.server.openapi_parts import answers, any_of, generates

MESSAGES_TYPES = (MessagesRequest, CountMessagesRequest, MessageBody, MessageTokens, MessageError, *EVENTS)

_ERROR = MessageError.__name__
_EVENT = any_of(kind.__name__ for kind in EVENTS)
MESSAGES_PATHS = {
    "/v1/messages": generates("Answer a conversation.", "MessagesRequest", "MessageBody", _EVENT, error=_ERROR),
    "/v1/messages/count_tokens": answers(
        "Count the tokens of a conversation.", "CountMessagesRequest", "MessageTokens", error=_ERROR
    ),
}
