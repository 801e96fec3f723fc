"""llama.cpp's `/props`, `/slots` and `/lora-adapters`: what a server is, and what it is doing.

There are no slots: any number of answers share the KV cache. As many are shown as whole contexts
fit into it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from edgellm.llm import LLM
from edgellm.serve.endpoint import Call, Route
from edgellm.serve.llama_cpp_answer import settings
from edgellm.serve.request_error import RequestError
from edgellm.serve.streaming import Reply, json_reply
from edgellm.store.manifest import CHAT_TEMPLATE


async def props(call: Call) -> Reply:
    """Of the model of the parameter `model`, else of the first one."""
    pool = call.answering.pool
    model = pool.resolve(call.query("model"))
    async with pool.use(model) as llm:
        tokenizer, template = llm.engine.tokenizer, llm.engine.template
        return json_reply(
            {
                "default_generation_settings": {
                    "id": 0,
                    "n_ctx": llm.ctx_size,
                    "params": settings(llm.generation_options(), seed=None),
                },
                "total_slots": total_slots(llm),
                "model_alias": model,
                "model_path": llm.name.rpartition("/")[2],
                "modalities": {"vision": False, "audio": False},
                "chat_template": _template_text(llm),
                "chat_template_caps": {
                    "supports_tools": template is not None and template.traits.takes_tools
                },
                "bos_token": tokenizer.bos or "",
                "eos_token": next(iter(tokenizer.eos), ""),
                "build_info": f"edgellm {_version()}",
                "is_sleeping": False,
            }
        )


async def slots(call: Call) -> Reply:
    """With `fail_on_no_slot`, an error where none is free."""
    pool = call.answering.pool
    running = call.answering.metrics.running
    async with pool.use(pool.resolve(call.query("model"))) as llm:
        count = max(total_slots(llm), running)
        if call.query("fail_on_no_slot") and running >= total_slots(llm):
            raise RequestError("unavailable", "no slot available", retry_after_s=1)
        return json_reply(
            [
                {
                    "id": number,
                    "n_ctx": llm.ctx_size,
                    "speculative": True,
                    "is_processing": number < running,
                }
                for number in range(count)
            ]
        )


async def change_slot(call: Call) -> Reply:
    raise RequestError(
        "not_supported",
        "This server has no slots to save, restore or erase: what prompts have in common with "
        "earlier ones is found in the KV cache by itself",
    )


async def change_props(call: Call) -> Reply:
    raise RequestError("not_supported", "This server does not support changing global properties.")


async def adapters(call: Call) -> Reply:
    return json_reply([])


async def change_adapters(call: Call) -> Reply:
    raise RequestError("not_supported", "This server has no LoRA adapters loaded.")


def total_slots(llm: LLM) -> int:
    """Answers that all may fill their contexts."""
    cache = llm.options.cache_size
    return max(1, cache // llm.ctx_size) if cache else 2  # the default, see `EngineOptions`


def _template_text(llm: LLM) -> str:
    """The source of the chat template."""
    path = llm.engine.bundle.path / CHAT_TEMPLATE
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _version() -> str:
    try:
        return version("edgellm")
    except PackageNotFoundError:
        return ""


ROUTES = (
    Route("/props", {"GET": props, "POST": change_props}),
    Route("/slots", {"GET": slots}),
    Route("/slots/{id}", {"POST": change_slot}),
    Route("/lora-adapters", {"GET": adapters, "POST": change_adapters}),
)
