"""The tables: threads, runs, run_events, calls, recorded_runs, recorded_calls.

Created idempotently; `meta` holds the version.

Times are seconds since the epoch. JSON that we only hand through (inputs, outputs, event data) is text: what an
LLM writes may hold NUL characters, which PostgreSQL refuses in its own JSON types.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

VERSION = 2
# version -> what makes its tables those of the next one
UPGRADES = {"1": ("ALTER TABLE runs ADD COLUMN head_start_s FLOAT NOT NULL DEFAULT 0",)}

metadata = MetaData()
Position = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER numbers itself in SQLite

meta = Table("pbkv_meta", metadata, Column("name", String, primary_key=True), Column("value", String, nullable=False))

threads = Table(
    "threads",
    metadata,
    Column("thread_id", String, primary_key=True),
    Column("workflow", String),  # of the newest run; names the graph that reads the thread's checkpoints
    Column("status", String, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("state", Text, nullable=False),  # {"values": ..., "interrupts": ...} after the newest run
    Column("ephemeral", Boolean, nullable=False),  # made for a stateless run
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index("threads_by_update", "updated_at"),
)

runs = Table(
    "runs",
    metadata,
    Column("position", Position, Identity(), primary_key=True),  # order of arrival
    Column("run_id", String, nullable=False, unique=True),
    Column("thread_id", String, nullable=False),
    Column("workflow", String, nullable=False),
    Column("status", String, nullable=False),
    Column("multitask", String, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("request", Text, nullable=False),
    Column("attempt", Integer, nullable=False, default=0),
    Column("owner", String),  # the runner that executes it
    Column("lease_until", Float),
    Column("stop_request", String),  # interrupt or rollback, asked by whoever does not own the run
    Column("base_checkpoint", String),  # the thread's newest checkpoint before the run; where a rollback goes
    Column("last_seq", Integer, nullable=False, default=0),
    Column("events_dropped", Integer, nullable=False, default=0),
    Column("output", Text),
    Column("error", String),
    Column("message", Text),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("head_start_s", Float, nullable=False, server_default=text("0")),  # the queue: created_at less this
    Index("runs_by_status", "status", "position"),
    Index("runs_by_thread", "thread_id", "position"),
    Index("runs_by_end", "ended_at"),
    # The rule that two runners must never break is the database's to keep: a claim that would break it fails.
    Index(
        "one_running_run_a_thread",
        "thread_id",
        unique=True,
        sqlite_where=text("status = 'running'"),
        postgresql_where=text("status = 'running'"),
    ),
)

run_events = Table(
    "run_events",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("event", String, nullable=False),
    Column("data", Text, nullable=False),
)

calls = Table(
    "calls",
    metadata,
    Column("position", Position, Identity(), primary_key=True),
    Column("run_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("call_id", String, nullable=False),
    Column("agent", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("reason", String, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("device_cached_tokens", Integer, nullable=False),
    Column("host_cached_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("replica", String, nullable=False),
    Column("at_s", Float, nullable=False),
    Index("calls_by_run", "run_id", "position"),
)

# JSON of deployments/kv.py: why a call found what it found. Apart from the calls, which are read far more often.
call_reports = Table(
    "call_reports",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("call_id", String, primary_key=True),
    Column("data", Text, nullable=False),
)

# What the controller records for training: apart from the runs, which are deleted when they are old.
recorded_runs = Table(
    "recorded_runs",
    metadata,
    Column("position", Position, Identity(), primary_key=True),
    Column("run_id", String, nullable=False, unique=True),
    Column("workflow", String, nullable=False),
    Column("outcome", String, nullable=False),
    Column("started_s", Float, nullable=False),
    Column("ended_s", Float, nullable=False),
)

recorded_calls = Table(
    "recorded_calls",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),  # order of starts
    Column("call_id", String, nullable=False),
    Column("agent", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("started_s", Float, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("reason", String, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("output_tokens", Integer, nullable=False),
    Column("device_cached_tokens", Integer, nullable=False),
    Column("host_cached_tokens", Integer, nullable=False),
    Column("replica", String, nullable=False),
    Column("prefill", LargeBinary),  # hidden states: float16, little-endian
    Column("decode", LargeBinary),
    Column("blocks", LargeBinary),  # hashes of the prompt's full blocks: int64, little-endian
)
