"""Turns prompts into token ids and completions into messages: chat template, response parser, tools in the prompt.

Differs from TRL, whose trainer does this: a `Chat` can be copied for a thread, with its own tokenizer. Used for prompts
(`tokenize`), after the first turn (`decode`) and between turns.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import ProcessorMixin
from trl import is_conversational

from ..compat import parse_response, prepare_multimodal_messages
from ..errors import DataError, counted
from ..forward.images import images_of
from ..upstream.data_checks import ROW_KWARGS
from .transcript import Messages, Transcript

Tools = Sequence[Callable[..., Any]]

_RENDERED = {"conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict"}
# a message needs one of these
_CONTENTS = ("content", "tool_calls", "reasoning_content", "thinking")


@dataclass(frozen=True)
class Chat:
    processing_class: Any  # the tokenizer, or the processor of a model that takes images
    tokenizer: Any  # TRL's `_tokenizer`, which decodes completions
    tools: Tools = ()  # standalone ones and those of every environment; empty: none is called
    # the tools shown in prompts of an environment, by its name; None without environments
    environment_tools: Mapping[str | None, Tools] | None = None
    chat_template: str | None = None  # None: the tokenizer's
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    embedded: int | None = None  # rows of the model's embedding; None: unknown
    placeholders: Sequence[str] = ()  # that stand for an image, so no text may contain them

    @property
    def takes_images(self) -> bool:
        return isinstance(self.processing_class, ProcessorMixin)

    def check(self, prompt: Any) -> None:
        for message in () if isinstance(prompt, str) else prompt if isinstance(prompt, list) else [prompt]:
            has_content = isinstance(message, Mapping) and any(message.get(name) is not None for name in _CONTENTS)
            if not isinstance(prompt, list) or not has_content or message.get("role") is None:
                raise DataError(
                    f"the prompt {reprlib.repr(prompt)} is neither a text nor a list of messages that each have a "
                    f"'role' and a 'content' ({reprlib.repr(message)}); with dataset.map decode token ids, put a "
                    "single message into a list, rename 'from' and 'value', and fill contents."
                )
        self._refuse_placeholders(f"the prompt {reprlib.repr(prompt)}", prompt)

    def _refuse_placeholders(self, what: str, shown: Any) -> None:
        for token in self.placeholders:
            if token in str(shown):
                raise DataError(
                    f"{what} has the text {token!r}, which stands for an image, a video or a sound of the model, and "
                    "would be counted as one; take it out (a chat template puts images where their messages have them)."
                )

    def of_row(self, row: Mapping[str, Any]) -> "Chat":
        """This chat with the `chat_template_kwargs` of a row, if any, as TRL's SFT and DPO read them."""
        kwargs = row.get(ROW_KWARGS)
        if not isinstance(kwargs, Mapping | None):
            raise DataError(f"{ROW_KWARGS}={reprlib.repr(kwargs)} in a row of the data; make it a dictionary, or None.")
        # every row of a data set has the names of all rows, with None where it sets nothing
        named = {name: value for name, value in (kwargs or {}).items() if value is not None}
        problem = "a template is not applied to a prompt that is a text" if isinstance(row.get("prompt"), str) else ""
        if fixed := sorted(_RENDERED & named.keys()):
            problem = f"{', '.join(fixed)} cannot be set by a row"
        if named and problem:
            raise DataError(f"{ROW_KWARGS}={reprlib.repr(kwargs)} in a row of the data: {problem}; leave it out.")
        return replace(self, chat_template_kwargs={**self.chat_template_kwargs, **named}) if named else self

    def tools_of(self, environment_name: str | None) -> Tools:
        return self.tools if self.environment_tools is None else self.environment_tools[environment_name]

    # ---- Prompts to ids -------------------------------------------------------------------------------------------

    def with_images(self, prompt: Any, row: Mapping[str, Any]) -> Any:
        """The prompt with the images of its row in the content of its messages; a DataError for a text with images.

        Differs from TRL, where all rows of a process decide whether texts become content parts: here each row does.
        """
        images = images_of(dict(row))
        if isinstance(prompt, str):
            if images:
                raise DataError(
                    f"a row has {counted(len(images), 'image')}, and its prompt is the text {prompt[:40]!r}; images "
                    "belong in messages: write [{'role': 'user', 'content': ...}], and the chat template is applied "
                    "later."
                )
            return prompt
        has_column = "images" in row or "image" in row
        if images or (has_column and self.takes_images):
            return prepare_multimodal_messages(prompt, images=images)
        return prompt

    def tokenize(self, prompt: Any, environment_name: str | None = None) -> list[int]:
        self.check(prompt)
        if isinstance(prompt, str):
            return list(self.processing_class(text=[prompt])["input_ids"][0])
        return self._render(self._as_shown(prompt), self.tools_of(environment_name))

    def _as_shown(self, messages: Messages) -> Messages:
        return prepare_multimodal_messages(messages) if self.takes_images else messages

    def check_ids(self, ids: Sequence[int], what: str) -> None:
        if not ids:
            raise DataError(f"{what} has no tokens; filter such rows out.")
        if self.embedded is not None and (bad := [token for token in ids if not 0 <= token < self.embedded]):
            raise DataError(
                f"{what} has the token id {bad[0]}, and the model's embedding has {self.embedded} rows; use the model's"
                " own tokenizer, or model.resize_token_embeddings(len(tokenizer))."
            )

    def _render(self, messages: Messages, tools: Tools = (), prompt: bool = True) -> list[int]:
        """Token ids of a conversation; with `prompt` the beginning of the model's next message is added."""
        try:
            rendered = self.processing_class.apply_chat_template(
                conversation=[messages],
                tools=list(tools) or None,  # Llama's template has a paragraph for tools=[]
                chat_template=self.chat_template,
                add_generation_prompt=prompt,
                tokenize=True,
                return_dict=True,
                **self.chat_template_kwargs,
            )
        except Exception as error:  # a template may raise anything
            if (self.chat_template or getattr(self.processing_class, "chat_template", None)) is None:
                raise DataError(
                    "the tokenizer has no chat_template for prompts of messages; set tokenizer.chat_template and pass "
                    "the tokenizer as processing_class, or use texts as prompts."
                ) from None
            raise DataError(
                f"the chat template does not accept {reprlib.repr(messages)} ({type(error).__name__}: {error}); "
                "set a chat_template that does, or change the prompts: texts need no template, and where it refuses "
                "the role 'system', put that text before the user's."
            ) from error
        return rendered["input_ids"][0]

    def suffix_ids(self, answers: Messages, with_end: bool = False) -> list[int]:
        """The tokens between the model's tool calls and its next turn.

        `with_end` includes the end token of the calls; some templates add a line break after it.
        """
        self._refuse_placeholders(f"the answer of the tool {answers[0]['name']!r}", answers)
        # the answers follow a call of the first tool, because some templates repeat its name
        call = {"type": "function", "function": {"name": answers[0]["name"], "arguments": {}}}
        before: Messages = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": "", "tool_calls": [call]},  # processors need a content
        ]
        before, answers = self._as_shown(before), self._as_shown(answers)
        prefix, ids = self._render(before, prompt=False), self._render([*before, *answers])
        if (end := self.tokenizer.eos_token_id) in prefix:
            prefix = prefix[: len(prefix) - prefix[::-1].index(end) - with_end]
        if ids[: len(prefix)] != prefix:
            raise DataError(
                f"the chat template renders a call of the tool {answers[0]['name']!r} differently once its answer "
                "follows, so an answer cannot be added to a completion; use a template that only appends."
            )
        return ids[len(prefix) :]

    # ---- Ids to messages ------------------------------------------------------------------------------------------

    def decode(self, transcripts: Sequence[Transcript]) -> None:
        """Set the completion and the tool calls of transcripts after their first turn."""
        if not transcripts:
            return
        schemas = (getattr(self.tokenizer, name, None) for name in ("response_template", "response_schema"))
        parses = any(schema is not None for schema in schemas)
        last = [
            (t.ids, t.prompt_ids) if (r := t.returned) is None else (r.last_ids, r.last_context) for t in transcripts
        ]
        texts = self.processing_class.batch_decode([ids for ids, _ in last], skip_special_tokens=True)
        for t, text, ids_and_context in zip(transcripts, texts, last, strict=True):
            if (messages := bool(t.prompt) and is_conversational({"prompt": t.prompt})) and parses:
                t.completion = []
                self.add_message(t, *ids_and_context)
            else:
                t.completion, t.calls = [{"role": "assistant", "content": text}] if messages else text, []

    def add_message(self, transcript: Transcript, ids: list[int], context: list[int]) -> None:
        """Add the message in tokens after a context, and set its tool calls; without tools there are none."""
        shown = list(self.tools_of(transcript.environment_name))
        message = parse_response(self.tokenizer, ids, context, shown)
        transcript.completion = [*transcript.completion, message]
        transcript.calls = list(message.get("tool_calls") or ()) if self.tools else []
