"""The worker's settings, and the sizes that follow from them, the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from engine_worker.device import DeviceSetting, KernelsSetting
from engine_worker.driver.compile import ExecutorSetting
from engine_worker.errors import ConfigError
from engine_worker.memory import available_memory_bytes
from engine_worker.models.layout import MAX_RANKS, Parallelism
from engine_worker.models.placement import read_placement
from engine_worker.plan.memory import page_bytes
from engine_worker.plan.record import KvCache
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.scheduler.limits import Limits
from glmserve.service.listen_settings import ListenSettings
from glmserve.service.logs import LogLevel
from glmserve.service.telemetry import TelemetrySettings

ExchangeSetting = Literal["replicate", "all_to_all", "auto"]

_DEFAULT_CONTEXT = 4096
# Of the memory that is free at start, for KV pages by default: the rest is for the file cache, which holds the weights.
_KV_SHARE = 0.25


class WorkerConfig(ListenSettings, TelemetrySettings):
    """GLM_WORKER_* in the environment."""

    model_config = SettingsConfigDict(env_prefix="GLM_WORKER_")

    model: Path = Field(description="Directory of the checkpoint.")
    weights: Literal["checkpoint", "synthetic"] = Field(
        "checkpoint",
        description="synthetic: made up, to try and measure shapes; of the model only config.json is read.",
    )
    synthetic_seed: int = Field(0, ge=0, le=2**63 - 1, description="Of synthetic weights.")
    listen: str = Field("127.0.0.1:50061", pattern=r"^.+:\d{1,5}$", description="HOST:PORT; port 0 takes any free one.")
    ready_file: Path | None = Field(
        None, description="Written with the bound address and the process id once it is listening."
    )
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")
    device: DeviceSetting = Field("auto", description="cpu, cuda, or auto: cuda if a GPU answers.")
    gpu: int = Field(0, ge=0, description="Index of the GPU, with cuda.")
    kernels: KernelsSetting = Field(
        "native", description="native: the tables in C++ and CUDA; futhark: the portable one (`make futhark`)."
    )
    executor: ExecutorSetting = Field(
        "native",
        description="native: walks the plan; terra: the plan compiled (needs Terra); terra-debug: with checks.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="Threads of the CPU kernels, shared by the ranks; 0: one for each core."
    )
    tp: int = Field(1, ge=1, le=MAX_RANKS, description="Ranks: heads, widths and vocabulary are divided among them.")
    ep: int | None = Field(
        None,
        ge=1,
        le=MAX_RANKS,
        description="Groups of ranks that experts are divided among, a divisor of tp; unset: experts are cut least.",
    )
    expert_placement: Path | None = Field(
        None, description="File that says which group of ranks holds which expert; `glm plan place` makes one."
    )
    expert_loads: Path | None = Field(
        None, description="File to keep: the tokens given to each expert, for `glm plan place`."
    )
    expert_exchange_prefill: ExchangeSetting = Field(
        "replicate",
        description="replicate: tokens are on all ranks; all_to_all: they go to the ranks that have their experts (ep ="
        " tp); auto: whichever is faster at start-up.",
    )
    expert_exchange_decode: ExchangeSetting = Field("replicate", description="Likewise, of decode steps.")
    expert_metrics: bool = Field(
        False, description="A metric for each expert of each layer: 14,240 of them for GLM-4.7."
    )
    rank_slice: int | None = Field(
        None,
        ge=0,
        lt=MAX_RANKS,
        description="Run this rank of the layout alone, to measure it: its text means nothing.",
    )
    stall_seconds: float = Field(
        8.0,
        gt=0,
        le=86400,
        description="With several ranks: a step in which no rank ends an operation for longer is stuck.",
    )
    kv_dtype: Literal["auto", "f32", "bf16", "fp8"] = Field(
        "auto", description="Of cached K and V; auto: the model's own."
    )
    max_context: int | None = Field(
        None,
        ge=PAGE_SIZE,
        multiple_of=PAGE_SIZE,
        description="Tokens of prompt and completion; unset: 4096 or the model's.",
    )
    max_running: int = Field(64, ge=1, le=4096, description="Requests that run at once.")
    step_tokens: int = Field(512, ge=2, le=65536, description="Rows of one step, prefill and decode together.")
    kv_memory_mb: int | None = Field(None, ge=1, description="Memory for KV pages; unset: by what is free and needed.")
    prefix_cache: bool = Field(True, description="Keep K and V of finished requests for prompts that begin alike.")
    priority_aging_seconds: float = Field(
        30.0, gt=0, le=86400, description="Waiting that weighs as one step of priority."
    )
    max_waiting_requests: int = Field(1024, ge=1, le=1_000_000, description="Accepted and not yet started, at most.")
    max_waiting_prompt_tokens: int = Field(1_000_000, ge=1, description="Prompt tokens of those, at most.")
    step_timeout_seconds: float = Field(
        120.0,
        gt=0,
        le=86400,
        description="A step that takes longer is stuck: the worker reports itself dead and exits.",
    )
    drain_seconds: float = Field(30.0, ge=0, le=3600, description="For requests that run when a stop is asked for.")

    @model_validator(mode="after")
    def _check_step(self) -> WorkerConfig:
        if self.step_tokens <= self.max_running:
            raise ValueError(f"step_tokens ({self.step_tokens}) must be more than max_running ({self.max_running})")
        return self

    @property
    def parallelism(self) -> Parallelism:
        """Raises ConfigError if there is something wrong with the placement's file."""
        placement = None if self.expert_placement is None else read_placement(self.expert_placement)
        return Parallelism(self.tp, self.ep, self.rank_slice, placement)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the engine is made with."""

    max_context: int
    num_pages: int
    fit_pages: bool = False  # num_pages is the most: what the device's memory leaves is for the engine to find out


def plan_sizes(config: WorkerConfig, model_context: int, kv: KvCache, *, device_memory: bool = False) -> Sizes:
    """`kv` is that of all ranks whose pages share a memory; `device_memory`: a device's own, not the host's.

    Raises ConfigError if the setting exceeds the model's context or the memory does not hold a single page.
    """
    if config.max_context is not None and config.max_context > model_context:
        raise ConfigError(f"max_context: {config.max_context}, the model's own is {model_context}")
    longest = min(model_context, _DEFAULT_CONTEXT) if config.max_context is None else config.max_context
    max_context = longest - longest % PAGE_SIZE
    bytes_a_page = page_bytes(kv, PAGE_SIZE)
    if config.kv_memory_mb is None:
        wanted = config.max_running * max_context // PAGE_SIZE
        if device_memory:
            return Sizes(max_context, wanted, fit_pages=True)
        num_pages = min(wanted, int(available_memory_bytes() * _KV_SHARE) // bytes_a_page)
    else:
        num_pages = config.kv_memory_mb * 2**20 // bytes_a_page
    if num_pages < 1:
        raise ConfigError(f"kv_memory_mb: too little for one KV page of {bytes_a_page} bytes")
    return Sizes(max_context, num_pages)


def scheduler_limits(config: WorkerConfig, sizes: Sizes) -> Limits:
    return Limits(
        num_pages=sizes.num_pages,
        page_size=PAGE_SIZE,
        max_context=sizes.max_context,
        max_running=config.max_running,
        max_step_tokens=config.step_tokens,
        prefix_cache=config.prefix_cache,
        aging_s=config.priority_aging_seconds,
    )
