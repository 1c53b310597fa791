"""Prompts to token ids and back: the chat template, the response parser and the tools that a prompt shows.

Differs from TRL, whose trainer does this: a `Chat` can be copied for a thread, with a tokenizer of its own. Used for
prompts (`tokenize`), after the first turn (`decode`) and between turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import ProcessorMixin
from trl import is_conversational

from ..compat import parse_response, prepare_multimodal_messages
from ..errors import DataError
from ..forward.images import images_of
from .transcript import Messages, Transcript


@dataclass(frozen=True)
class Chat:
    """The chat template of a rollout batch.

    Attributes:
        processing_class: the tokenizer; the processor of a model that takes images.
        tools: standalone ones and those of every environment; empty: no completion calls any.
        environment_tools: the tools shown in prompts of an environment, by its name; None without environments.
        chat_template: with `chat_template_kwargs`, its further arguments; None: the tokenizer's.
        own_tokenizer: TRL's `_tokenizer`, which reads what the model wrote; None: that of `processing_class`.
        suffix: the user's `_get_tool_suffix_ids`; None: `suffix_ids` is TRL's.
    """

    processing_class: Any
    tools: Sequence[Callable[..., Any]] = ()
    environment_tools: Mapping[str | None, Sequence[Callable[..., Any]]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    own_tokenizer: Any = None
    suffix: Callable[[Messages], list[int]] | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, also where a processor holds it."""
        return self.own_tokenizer or getattr(self.processing_class, "tokenizer", self.processing_class)

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return isinstance(self.processing_class, ProcessorMixin)

    @property
    def _parses(self) -> bool:
        names = ("response_template", "response_schema")
        return any(getattr(self.tokenizer, name, None) is not None for name in names)

    def tools_of(self, environment_name: str | None) -> Sequence[Callable[..., Any]]:
        """The tools shown in prompts of an environment."""
        return self.tools if self.environment_tools is None else self.environment_tools[environment_name]

    # ---- Prompts to ids -------------------------------------------------------------------------------------------

    def with_images(self, prompt: Any, row: Mapping[str, Any]) -> Any:
        """The prompt with the images of its row of the data set in the content of its messages.

        Differs from TRL, where all rows of a process decide whether texts become content parts: here each row does.

        Raises:
            DataError: a row has images, and its prompt is a text.
        """
        images = images_of(dict(row))
        if isinstance(prompt, str):
            if images:
                raise DataError(
                    f"a row has {len(images)} image(s), and its prompt is the text {prompt[:40]!r}; images stand in "
                    "messages: write [{'role': 'user', 'content': ...}], and the chat template is applied later."
                )
            return prompt
        has_column = "images" in row or "image" in row
        if images or (has_column and self.takes_images):
            return prepare_multimodal_messages(prompt, images=images)
        return prompt

    def tokenize(self, prompts: Sequence[Any], environment_names: Sequence[str | None]) -> list[list[int]]:
        """Token ids of prompts, all texts or all messages.

        Args:
            environment_names: one for each prompt; None where there is one environment, or none.
        """
        if not prompts:
            return []
        if not is_conversational({"prompt": prompts[0]}):
            return self.processing_class(text=list(prompts))["input_ids"]
        if self.takes_images:
            prompts = [prepare_multimodal_messages(prompt) for prompt in prompts]
        if self.environment_tools is None:
            return self._render(prompts, self.tools)
        pairs = zip(prompts, environment_names, strict=True)
        return [self._render([prompt], self.tools_of(name))[0] for prompt, name in pairs]

    def _render(
        self, conversations: Sequence[Messages], tools: Sequence[Callable[..., Any]] = (), prompt: bool = True
    ) -> list[list[int]]:
        """Token ids of conversations; with `prompt` the beginning of the model's next message is added."""
        rendered = self.processing_class.apply_chat_template(
            conversation=list(conversations),
            tools=list(tools) or None,  # Llama's template has a paragraph for tools=[]
            chat_template=self.chat_template,
            add_generation_prompt=prompt,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )
        return rendered["input_ids"]

    def suffix_ids(self, answers: Messages) -> list[int]:
        """The tokens between the model's tool calls and its next turn.

        They are rendered after a short conversation that calls the first of these tools, because some templates repeat
        its name.

        Raises:
            DataError: the template renders a call in another way once an answer follows.
        """
        if self.suffix is not None:
            return list(self.suffix(answers))
        call = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
        before: Messages = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": "", "tool_calls": [call]},  # processors want a content
        ]
        if self.takes_images:
            before, answers = prepare_multimodal_messages(before), prepare_multimodal_messages(answers)
        (prefix,) = self._render([before], prompt=False)
        (ids,) = self._render([[*before, *answers]])
        # a completion ends with the end token, after which some templates break the line
        if (end := self.tokenizer.eos_token_id) in prefix:
            prefix = prefix[: len(prefix) - prefix[::-1].index(end)]
        if ids[: len(prefix)] != prefix:
            raise DataError(
                f"the chat template renders a call of the tool {answers[0]['name']!r} in another way where its answer "
                "follows, so an answer cannot be added to a completion; use a template that only adds to what it wrote."
            )
        return ids[len(prefix) :]

    # ---- Ids to messages ------------------------------------------------------------------------------------------

    def decode(self, transcripts: Sequence[Transcript]) -> None:
        """Set completion and calls of transcripts after their first turn; all prompts are texts, or all messages."""
        if not transcripts:
            return
        if (messages := is_conversational({"prompt": transcripts[0].prompt})) and self._parses:
            for t in transcripts:
                t.completion = []
                self.add_message(t, len(t.ids))
            return
        texts = self.processing_class.batch_decode([t.ids for t in transcripts], skip_special_tokens=True)
        for t, text in zip(transcripts, texts, strict=True):
            t.completion, t.calls = [{"role": "assistant", "content": text}] if messages else text, []

    def add_message(self, transcript: Transcript, tokens: int) -> None:
        """Add the message that the model wrote with the last `tokens` tokens, and set the calls in it.

        A run without tools has no calls, whatever the model writes.
        """
        ids = transcript.prompt_ids + transcript.ids
        start = len(ids) - tokens
        shown = list(self.tools_of(transcript.environment_name))
        message = parse_response(self.tokenizer, ids[start:], ids[:start], shown)
        transcript.completion = [*transcript.completion, message]
        transcript.calls = list(message.get("tool_calls") or ()) if self.tools else []
