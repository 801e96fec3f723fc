"""lm-eval: a multiple-choice task by the scores of prompts, with the server's tokenizer."""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, model = sys.argv[1:]
ITEMS = [
    {"question": "What barks?", "choices": [" a dog", " a tree", " a stone"], "answer": 0},
    {"question": "What is two plus two?", "choices": [" three", " four"], "answer": 1},
]
TASK = f"""
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {Path("items.jsonl").absolute()}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
Path("items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
Path("tasks").mkdir()
Path("tasks/local_choice.yaml").write_text(TASK)
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote,"
    "num_concurrent=2,max_retries=1",
    tasks=["local_choice"],
    task_manager=TaskManager(include_path="tasks"),
    log_samples=True,
    bootstrap_iters=0,
)
samples = sorted(found["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
scores = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
print(json.dumps({"name": "scores", "value": scores}), flush=True)
accuracy = found["results"]["local_choice"]["acc,none"]
print(json.dumps({"name": "accuracy", "value": accuracy}), flush=True)
