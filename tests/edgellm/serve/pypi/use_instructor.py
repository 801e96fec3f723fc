"""instructor: answers as objects, in its modes for servers like this one."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

url, model = sys.argv[1:]


class Size(BaseModel):
    """How large something is."""

    unit: Literal["cm", "m"]
    tall: bool


MODES = (
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
)
raw = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
for mode in MODES:
    client = instructor.from_openai(raw, mode=mode)
    size = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"{mode.name}: a tower of 50 metres."}],
        response_model=Size,
        max_tokens=200,
        max_retries=0,
        seed=1,
    )
    print(json.dumps({"name": mode.name, "value": size.model_dump()}), flush=True)
