"""The list of models, of which there is one: whatever is asked for, the session's policy answers."""

MODEL = "etude"


def model_list(*, is_anthropic: bool) -> dict[str, object]:
    """Return the one model, as OpenAI or Anthropic list models."""
    models = [model_named(MODEL, is_anthropic=is_anthropic)]
    if is_anthropic:
        return {"data": models, "has_more": False, "first_id": MODEL, "last_id": MODEL}
    return {"object": "list", "data": models}


def model_named(name: str, *, is_anthropic: bool) -> dict[str, object]:
    """Return a model of any name, as OpenAI or Anthropic describe models."""
    name = name[:256]
    if is_anthropic:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": MODEL}
