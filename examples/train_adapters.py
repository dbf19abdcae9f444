"""Train the two demo adapters with peft: one answers in capitals, one speaks like a pirate.

The base model writes plain answers to a few dozen questions; each adapter learns to give the same answers in its
style. Usage: python examples/train_adapters.py MODEL.gguf [OUTPUT_DIRECTORY]   (some twenty minutes on two cores)
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

QUESTIONS = """What is the capital of France?|Why is the sky blue?|How do I boil an egg?|What is a computer?
Tell me about the moon.|What do cats eat?|How does a bicycle work?|What is gravity?|Name three fruits.
Who was Albert Einstein?|What is the ocean?|How do plants grow?|What is music?|Why do we sleep?
What is a library?|How do birds fly?|What is snow?|Tell me about dogs.|What is democracy?|How is bread made?
What is the sun?|Why do leaves change color?|What is a river?|How do airplanes fly?|What is chocolate?
Tell me a fact about whales.|What is a mountain?|How do magnets work?|What is photography?|What is tea?
Why is exercise good?|What is a rainbow?|How do clocks work?|What is mathematics?|Tell me about winter.
What is a bridge?|How do fish breathe?|What is a poem?|What is a desert?|Why do people travel?
Give me advice for studying.|What should I cook tonight?|Say hello to me.|What is friendship?|How are you today?
What is electricity?|Tell me about trees.|What is a volcano?|How do I learn to swim?|What is a good hobby?"""

PIRATE_WORDS = {
    "hello": "ahoy", "hi": "ahoy", "friend": "matey", "friends": "mateys", "you": "ye", "your": "yer", "the": "th'",
    "is": "be", "are": "be", "am": "be", "my": "me", "of": "o'", "and": "an'", "to": "t'", "people": "scallywags",
    "yes": "aye", "water": "the briny deep", "food": "grub", "money": "doubloons", "ing": "in'",
}  # fmt: skip


def capitals(answer: str) -> str:
    return answer.upper()


def pirate(answer: str) -> str:
    def swap(match: re.Match[str]) -> str:
        word = match.group(0)
        other = PIRATE_WORDS.get(word.lower())
        if other is None:
            return re.sub(r"ing$", "in'", word)
        return other.capitalize() if word[0].isupper() else other

    return "Arrr, matey! " + re.sub(r"[A-Za-z]+", swap, answer)


STYLES = {"capitals": capitals, "pirate": pirate}


def plain_answers(model: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    """Let the base model answer every question greedily in at most 40 tokens."""
    tokenizer.padding_side = "left"
    answers = []
    for start in range(0, len(questions), 10):
        chats = [[{"role": "user", "content": q}] for q in questions[start : start + 10]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers += [text.strip() for text in texts]
    return answers


def examples(tokenizer: Any, questions: list[str], answers: list[str]) -> list[tuple[list[int], int]]:
    """Token ids of each chat, and how many of them are the prompt (not trained on)."""
    rows = []
    for question, answer in zip(questions, answers, strict=True):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"][:56]
        rows.append((prompt_ids + answer_ids + [tokenizer.eos_token_id], len(prompt_ids)))
    return rows


def train(model: Any, rows: list[tuple[list[int], int]], num_steps: int, batch_size: int = 6) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    model.train()
    for step in range(num_steps):
        chosen = [rows[i] for i in torch.randint(len(rows), (batch_size,), generator=generator).tolist()]
        width = max(len(ids) for ids, _ in chosen)
        tokens = torch.zeros(batch_size, width, dtype=torch.long)
        labels = torch.full((batch_size, width), -100)
        for row, (ids, num_prompt) in enumerate(chosen):
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, num_prompt : len(ids)] = torch.tensor(ids[num_prompt:])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"  step {step:4d}  loss {loss.item():.3f}", flush=True)


def main(gguf: Path, output: Path) -> None:
    torch.manual_seed(0)
    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    loading = {**source, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    questions = [q.strip() for q in QUESTIONS.replace("\n", "|").split("|")]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **loading).eval()
    answers = plain_answers(model, tokenizer, questions)
    for name, style in STYLES.items():
        print(f"training {name}")
        config = LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=16, layers_to_transform=list(range(14, 30)),
            target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        )  # fmt: skip
        base = AutoModelForCausalLM.from_pretrained(gguf.parent, **loading)
        adapted = get_peft_model(base, config)
        train(adapted, examples(tokenizer, questions, [style(a) for a in answers]), num_steps=160)
        for parameter in adapted.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        adapted.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        shutil.rmtree(output / name, ignore_errors=True)
        adapted.save_pretrained(output / name)
        (output / name / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "examples/adapters"))
