"""Random calls to `generate`, one at a time, from several threads, and after the weights have changed.

The decoders of the families differ in structure. Properties of a model determine the kinds of calls that it doesn't
support, with stock transformers or with recorded steps. These kinds are left out, and every remaining call must be
recorded.
"""

from __future__ import annotations

import copy
import gc
import inspect
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from transformers import DynamicCache

import hf_rocm
from hf_rocm.generation import decide
from hf_rocm.generation.state import known
from tests.generation import conftest, test_encoder_decoder
from tests.releases import RELEASE


def _recorded(prefix):
    """Whether this release has the class, and hf_rocm records its steps."""
    cls = getattr(transformers, f"{prefix}ForCausalLM", None)
    if cls is None or decide.refuses_class(cls) is not None:
        return False
    return not getattr(cls, "_is_stateful", False) or Version("5.16") <= RELEASE


DECODERS = [name for name, (prefix, _) in {**conftest.KINDS, **conftest.FURTHER}.items() if _recorded(prefix)]
FAMILIES = [*DECODERS, *test_encoder_decoder.CLASSES]
THREADS = 4
# The number of initial rounds that `grown` does not count.
_ROUNDS = 5

_STATIC = Version("4.54") <= RELEASE
# before 5.14, stock may be unable to remove drafts from a cache with sliding windows
_WINDOWS_KEEP_DRAFTS = Version("5.14") > RELEASE
_CACHE_TAKES_CONFIG = "config" in inspect.signature(DynamicCache.__init__).parameters


class Soak:
    """A recorded model and a stock model, which run the same calls.

    longest: the largest number of tokens of a prompt, and of new tokens. scale: a factor for all matrices.
    """

    def __init__(self, family, *, device="cpu", longest=24, scale=1.0, **sizes):
        self.is_encoder_decoder = family in test_encoder_decoder.CLASSES
        self.family, self.device, self.longest = family, device, longest
        make = test_encoder_decoder.make if self.is_encoder_decoder else conftest.make
        self.stock = make(family, **sizes).to(device)
        with torch.no_grad():
            for parameter in self.stock.parameters():
                parameter.mul_(scale if parameter.ndim > 1 else 1.0)
        self.prepared = hf_rocm.prepare(copy.deepcopy(self.stock), force=True, graphs=True)
        self.stateful = getattr(type(self.stock), "_is_stateful", False)
        windows = decide.windows(self.prepared)
        assert not isinstance(windows, str), windows
        self.has_windows = not self.stateful and any(windows)
        # Stock's BART fails in 4.53.
        self._accepts_dynamic = _STATIC or not self.is_encoder_decoder
        # number → the results of stock's call, and the next random number
        self.expected = {}

    def differing(self, numbers):
        """Run calls one at a time. Returns the numbers of those whose results differ from stock's."""
        failed = []
        for number in numbers:
            results = []
            for model in (self.stock, self.prepared):
                torch.manual_seed(number)
                results.append([*self._results(model, number), torch.rand(1, device=self.device).tolist()])
            self.expected[number] = results[0]
            if results[0] != results[1]:
                failed.append(number)
        return failed

    def differing_in_threads(self, numbers, *, limit):
        """Repeat calls in several threads. Returns the numbers of those whose results differ from stock's earlier ones.

        Only greedy calls are repeated, because the threads share the random state. limit: the largest number of
        repeated calls.
        """
        numbers = [number for number in numbers if not self.call(number)["do_sample"]][:limit]
        assistants = {number: self._assistant(self.prepared) for number in numbers}

        def work(first):
            failed = []
            with torch.cuda.stream(torch.cuda.Stream()) if self.device == "cuda" else nullcontext():
                for number in numbers[first::THREADS]:
                    results = self._results(self.prepared, number, assistant=assistants[number])
                    if results != self.expected[number][:-1]:
                        failed.append(number)
            return failed

        self._synchronize()
        with ThreadPoolExecutor(THREADS) as pool:
            return sorted(chain.from_iterable(pool.map(work, range(THREADS))))

    def change(self, function):
        """Call a function with the third linear layer of the decoder (often the value projection), in both models."""
        for model in (self.stock, self.prepared):
            layers = (model.get_decoder() if self.is_encoder_decoder else model).modules()
            function([layer for layer in layers if type(layer) is torch.nn.Linear][2])

    def differing_after(self, function, numbers):
        """Repeat calls after a change. Returns the numbers of those that differ from stock, or all numbers if
        the change does not affect stock's results.
        """
        before = [self.expected[number] for number in numbers]
        self.change(function)
        failed = self.differing(numbers)
        return failed if before != [self.expected[number] for number in numbers] else list(numbers)

    def assert_recorded(self, calls):
        """Check that no call ran uncaptured.

        On average, more than 4 steps per call must have been replayed, and more than one must have been compared.
        """
        state = known(self.prepared)
        assert state.disabled is None and not state.turned_away
        assert state.replayed > 4 * calls and state.compared > calls, (state.replayed, state.compared)

    def grown(self, calls, memory):
        """Repeat some short calls of the recorded model. Returns the growth of `memory()` over at least `calls` calls.

        The first rounds are not counted: they allocate caches and record steps, some only at their second occurrence.
        """
        numbers = [number for number in range(30) if "assistant" not in self.call(number, short=True)]
        before = None
        for index in range(_ROUNDS + -(-calls // len(numbers))):
            if index == _ROUNDS:
                before = self._measured(memory)
            for number in numbers:
                torch.manual_seed(number)
                self._results(self.prepared, number, short=True)
        return self._measured(memory) - before

    def _measured(self, memory):
        self._synchronize()
        gc.collect()
        return memory()

    def _synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def call(self, number, *, short=False):
        """The keyword arguments of a random call. number: the seed. `_results` replaces `assistant` and `cache`."""
        rng = random.Random(number)
        longest = 8 if short else self.longest
        rows, length = rng.choice((1, 1, 2, 3, 4)), rng.randint(1, longest)
        padded = rng.choice((0, 0, length // 2))
        inputs = self._prompt(rows, length, number, padded)
        arguments = {"max_new_tokens": rng.randint(2, longest), "pad_token_id": 0}
        arguments["do_sample"] = rng.random() < 0.4
        if arguments["do_sample"]:
            arguments |= {"temperature": rng.choice((0.7, 1.3)), "top_k": rng.choice((5, 20))}
            arguments |= rng.choice(({"top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.9}))
        if rng.random() < 0.4:
            arguments |= rng.choice(PROCESSORS)
        if rng.random() < 0.4:
            arguments["eos_token_id"] = rng.sample(range(3, 61), 4)
        if rng.random() < 0.2 and arguments["do_sample"]:
            arguments["num_return_sequences"] = 2
        if rng.random() < 0.4 and not self.stateful:
            arguments |= {"return_dict_in_generate": True, "output_scores": rng.random() < 0.5}
        cache = rng.choice(("none", "none", "static", "dynamic", "passed"))
        form = rng.choice(("plain", "plain", "beams", "lookup", "assistant"))
        if form == "beams":
            arguments |= {"num_beams": rng.choice((2, 3)), "early_stopping": rng.choice((True, False))}
        elif form != "plain" and self._drafts(form, arguments):
            inputs = {name: tensor[:1] for name, tensor in inputs.items()}
            arguments.pop("num_return_sequences", None)
            # Token 61 is beyond the vocabulary; stock before 5.0 needs an EOS token.
            arguments.setdefault("eos_token_id", 61)
            if form == "assistant":
                arguments["assistant"] = True
                # Stock can't pass the name of a cache to the assistant.
                cache = "none"
            else:
                arguments["prompt_lookup_num_tokens"] = rng.choice((2, 4, 10))
        drafts = "assistant" in arguments or "prompt_lookup_num_tokens" in arguments
        if (cache == "dynamic" and self._accepts_dynamic) or (cache == "static" and _STATIC and not drafts):
            arguments["cache_implementation"] = cache
        elif cache == "passed" and form != "beams" and not drafts and not self.stateful and not self.is_encoder_decoder:
            arguments["cache"] = rng.choice(("all keys", "windows"))
        return {**inputs, **arguments}

    def _drafts(self, form, arguments):
        """Whether both stock and the recorded steps can verify drafts of this form."""
        if self.stateful or self.is_encoder_decoder:
            return False
        returned = "return_dict_in_generate" in arguments
        return not self.has_windows or (form == "lookup" and not returned and not _WINDOWS_KEEP_DRAFTS)

    def _prompt(self, rows, length, seed, padded):
        if self.is_encoder_decoder:
            padded = padded if test_encoder_decoder.MASKS_IN_FOUR_DIMENSIONS else 0
            inputs = test_encoder_decoder.make_inputs(self.family, rows=rows, length=length, seed=seed, padded=padded)
        else:
            inputs = conftest.prompt(rows=rows, length=length, seed=seed, padded=padded)
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    def _results(self, model, number, *, assistant=None, short=False):
        """The tokens of a call as lists; if the call passes a cache, also the cache's length, for one or two turns."""
        arguments = self.call(number, short=short)
        if model is self.stock:
            # By default, stock compiles steps with a static cache.
            arguments["disable_compile"] = True
        if arguments.pop("assistant", False):
            arguments["assistant_model"] = assistant or self._assistant(model)
        form = arguments.pop("cache", None)
        if form is None:
            return [_tokens(model.generate(**arguments)).tolist()]
        config = {"config": self.stock.config} if _CACHE_TAKES_CONFIG and form == "windows" else {}
        cache, results = DynamicCache(**config), []
        for _ in range(1 if number % 2 else 2):
            tokens = _tokens(model.generate(**arguments, past_key_values=cache))
            results += [tokens.tolist(), cache.get_seq_length()]
            arguments.pop("num_return_sequences", None)
            arguments["input_ids"] = torch.cat((tokens, tokens[:, :3]), dim=1)
            mask = arguments["attention_mask"].repeat_interleave(len(tokens) // len(arguments["attention_mask"]), dim=0)
            arguments["attention_mask"] = F.pad(mask, (0, tokens.shape[1] + 3 - mask.shape[1]), value=1)
        return results

    def _assistant(self, model):
        """An assistant for a call of this model. The assistant's steps are recorded if the model's are."""
        assistant = conftest.assistant_of(self.stock)
        return assistant if model is self.stock else hf_rocm.prepare(assistant, force=True, graphs=True)


PROCESSORS = (
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 5},
    {"bad_words_ids": [[7], [8, 9]]},
)


def _tokens(result):
    return result if isinstance(result, torch.Tensor) else result.sequences


def _written(linear):
    with torch.no_grad():
        linear.weight.mul_(-1.5)


def _moved(linear):
    linear.weight.data = linear.weight.data * -1.5


def _replaced(linear):
    linear.weight = torch.nn.Parameter(linear.weight.detach() * -1.5)


CHANGES = [_written, _moved, _replaced]
