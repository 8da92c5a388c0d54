// The overview: counts, rates, replicas, runs. A page of the runs is chosen by the server; this file only shows it.

import { Feed, hasKey, json, keyIs } from "./feed.js";
import { bar, brief, chart, fill, h, keyed, letters, number, percent, span, tint } from "./draw.js";
import { RunPage } from "./run.js";

const $ = (id) => document.getElementById(id);
const query = { offset: 0, find: "", state: "" };
const STATES = { calling: "calling", thinking: "thinking", tool: "tool", human: "human", idle: "idle" };
const DASH = "\u2013";
let spoken = "";

function say(text) {
  if (text !== spoken) $("says").textContent = spoken = text;
}

function linked(state, text) {
  $("link").dataset.state = state;
  $("link-text").textContent = text;
}

const feed = new Feed({
  path: () => `/v1/live?${new URLSearchParams(Object.entries(query).filter(([, value]) => value))}`,
  heard: (snapshot) => {
    $("key").hidden = true;
    $("main").hidden = false;
    show(snapshot);
  },
  lost: (error, seconds) => {
    linked("lost", `no connection, next try in ${seconds} s`);
    say(`The connection is lost: ${error.message}`);
  },
  refused: (error) => {
    $("main").hidden = true;
    $("key").hidden = false;
    $("key-error").textContent = hasKey() ? error.message : "";
    keyIs(null);
    linked("wait", "a key is needed");
    $("key-value").focus();
  },
});
const page = new RunPage($("run"));

function show(snapshot) {
  const { runs, replicas, rates, queue, stale } = snapshot;
  $("stale").hidden = !stale;
  $("stale").textContent = stale ? `These numbers are old: ${stale}` : "";
  linked(stale ? "lost" : "live", stale ? "old numbers" : "live");
  const doubtful = replicas.filter((replica) => replica.state && replica.state !== "EXACT");
  say(stale ? "The numbers are old." : `Connected. ${replicas.length} replicas${doubtful.length ? `, of which ${doubtful.length} not exact` : ""}.`);
  showCounts(runs, replicas, queue);
  showRates(rates);
  showReplicas(snapshot);
  showRuns(snapshot);
  showEnded(snapshot);
  page.heard(snapshot);
}

function showCounts(runs, replicas, queue) {
  const waiting = queue.pending.length;
  const counts = [["in flight", runs.active]];
  for (const [state, name] of Object.entries(STATES)) if (runs.states[state]) counts.push([name, runs.states[state]]);
  if (waiting) counts.push(["queued", queue.more ? `${waiting}+` : waiting]);
  counts.push([replicas.length === 1 ? "replica" : "replicas", replicas.length]);
  fill($("counts"), counts, counts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value))));
}

const total = (values) => (values ?? []).reduce((sum, value) => sum + value, 0);

function showRates(rates) {
  if (!rates || !rates.at_s.length) {
    fill($("rates"), "none", h("p", { class: "quiet" }, "No calls have been measured yet: the first numbers come after some seconds."));
    return;
  }
  const every = rates.every_s, seconds = every * rates.at_s.length;
  const prompts = rates.prompt_tokens, shadow = rates.shadow_prompt_tokens;
  const share = (part, whole) => whole.map((all, index) => (all > 0 ? part[index] / all : null));
  const of = (part, whole) => (total(whole) ? percent(total(part) / total(whole)) : DASH);
  const both = rates.device_cached_tokens.map((tokens, index) => tokens + rates.host_cached_tokens[index]);
  const computed = prompts.map((tokens, index) => Math.max(0, tokens - both[index]));
  const pace = (values) => values?.map((value) => value / every) ?? [];
  const speed = (values) => (values ? brief(total(values) / seconds) : null);
  const minutes = Math.max(1, Math.round(seconds / 60));
  const shadowed = shadow && rates.shadow_cached_tokens;
  const drawn = [
    chart("Found in the cache", [
      { name: "device", kind: "k0", values: share(rates.device_cached_tokens, prompts), now: of(rates.device_cached_tokens, prompts) },
      { name: "and host", kind: "k1", values: share(both, prompts), now: of(both, prompts) },
      { name: "LRU would", kind: "k2", values: shadowed ? share(rates.shadow_cached_tokens, shadow) : [], now: shadowed ? of(rates.shadow_cached_tokens, shadow) : null },
    ], { most: 1, unit: "of prompt tokens", minutes }),
    chart("Prompt tokens", [
      { name: "computed", kind: "k3", values: pace(computed), now: speed(computed) },
      { name: "in all", kind: "k4", values: pace(prompts), now: speed(prompts) },
    ], { unit: "a second", minutes }),
    chart("Prefetched", [
      { name: "useful", kind: "k0", values: pace(rates.prefetch_useful), now: speed(rates.prefetch_useful) },
      { name: "late", kind: "k1", values: pace(rates.prefetch_late), now: speed(rates.prefetch_late) },
      { name: "wasted", kind: "k3", values: pace(rates.prefetch_wasted), now: speed(rates.prefetch_wasted) },
    ], { unit: "tokens a second", minutes }),
    chart("Evicted", [
      { name: "device", kind: "k0", values: pace(rates.evicted_device_tokens), now: speed(rates.evicted_device_tokens) },
      { name: "host", kind: "k1", values: pace(rates.evicted_host_tokens), now: speed(rates.evicted_host_tokens) },
    ], { unit: "tokens a second", minutes }),
  ];
  fill($("rates"), rates.at_s.at(-1), drawn);
}

function pool(name, replica, tier) {
  const held = replica[tier];
  if (!held) return h("p", { class: "quiet" }, `${tier} pool not reported`);
  const named = held.pieces.reduce((sum, [, tokens]) => sum + tokens, 0);
  const parts = held.pieces.map(([run, tokens]) => ({ run, tokens, kind: tint(run), text: letters(run), title: `${run}: ${number(tokens)} tokens` }));
  parts.push({ tokens: Math.max(0, held.used - named), kind: "others", title: `other runs: ${number(Math.max(0, held.used - named))} tokens` });
  parts.push({ tokens: held.retired, kind: "retired", title: `retired: ${number(held.retired)} tokens` });
  parts.push({ tokens: held.free, kind: "free", title: `free: ${number(held.free)} tokens` });
  const told = `${percent(held.used / held.pool)} used, ${percent(held.retired / held.pool)} retired, ${percent(held.free / held.pool)} free of ${number(held.pool)}`;
  return h("div", { class: "pool" }, h("span", { class: "tier" }, tier), bar(`${tier} pool of ${name}: ${told} tokens`, parts, held.pool), h("span", { class: "told" }, told));
}

function showReplicas({ replicas, at_s }) {
  const shown = replicas.slice(0, 24);
  $("replicas-note").textContent = replicas.length > shown.length ? `${shown.length} of ${replicas.length} shown` : replicas.length ? "" : "none has reported";
  keyed($("replicas"), shown, (replica) => replica.replica, () => h("div", { class: "replica" }), (node, replica) => {
    const silent = Math.round(at_s - replica.seen_s);
    fill(node, [replica, silent > 5 ? silent : 0],
      h("p", {}, h("b", { title: replica.replica }, replica.replica.split("#").at(-1)), " ",
        h("span", { class: "state", "data-state": replica.state ?? "" }, replica.state ?? "state not reported"),
        h("span", { class: "quiet" }, ` ${number(replica.runs)} runs held, ${number(replica.queued_prefill_tokens)} prompt tokens wait${silent > 5 ? `, silent for ${span(silent)}` : ""}`)),
      pool(replica.replica, replica, "device"), pool(replica.replica, replica, "host"));
  });
}

function likely(step, first) {
  if (!step || !step.length) return h("span", { class: "quiet" }, first ? "no forecast" : "");
  const [[agent, share], ...rest] = step;
  const meter = h("span", { class: "meter", "aria-hidden": true }, h("span", {}));
  meter.firstChild.style.width = `${100 * share}%`;
  const name = (text) => (text === "END" ? h("i", {}, "ends") : text);
  return h("span", { class: "likely", title: step.map(([who, p]) => `${who} ${percent(p)}`).join(", ") },
    h("span", {}, name(agent), h("small", {}, ` ${percent(share)}`)), meter,
    rest.length ? h("small", { class: "quiet" }, rest.slice(0, 1).map(([who, p]) => [name(who), ` ${percent(p)}`])) : null);
}

function pathOf(row) {
  const nodes = [h("span", { class: "count" }, number(row.calls)), row.calls > row.path.length ? "\u2026 \u203a " : null];
  row.path.forEach((agent, index) => nodes.push(index ? h("span", { class: "then", "aria-hidden": true }, "\u203a") : null, h("span", { class: "step" }, agent)));
  return nodes;
}

function now(row) {
  if (row.state === "tool") return [h("i", {}, "tool "), row.waiting_for];
  if (row.state === "human") return [h("i", {}, "a human")];
  return row.now.length ? [row.now.join(", ")] : [h("span", { class: "quiet" }, DASH)];
}

const opened = (run) => `#run=${encodeURIComponent(run)}`;

// A row that opens the run's page; the last two of its cells hold numbers.
function lineOf(run, cells) {
  const link = h("a", { href: opened(run), title: run }, h("span", { class: `piece ${tint(run)}`, "aria-hidden": true }), run.replace(/^ext:/, "").slice(0, 12));
  const line = h("tr", {}, h("th", { scope: "row" }, link), ...Array.from({ length: cells }, (_, at) => h("td", at >= cells - 2 ? { class: "n" } : {})));
  line.addEventListener("click", (event) => { if (event.target.tagName !== "A" && !String(getSelection())) location.hash = opened(run); });
  return line;
}

function showRuns({ runs, queue, at_s }) {
  const body = $("runs").tBodies[0];
  keyed(body, runs.rows, (row) => row.run_id, (row) => lineOf(row.run_id, 9), (line, row) => {
    const cells = line.querySelectorAll("td"), steps = row.forecast ?? [];
    const found = row.prompt_tokens ? percent((row.device_cached_tokens + row.host_cached_tokens) / row.prompt_tokens) : DASH;
    fill(cells[0], row.workflow, row.workflow || h("span", { class: "quiet" }, "unknown"));
    fill(cells[1], row.state, h("span", { class: `doing ${row.state}` }, STATES[row.state] ?? row.state));
    fill(cells[2], [row.path, row.calls], h("span", { class: "path" }, pathOf(row)));
    fill(cells[3], [row.state, row.now, row.waiting_for], now(row));
    for (const at of [0, 1, 2]) fill(cells[4 + at], [row.forecast === null, steps[at]], likely(steps[at], at === 0));
    fill(cells[7], found, found);
    fill(cells[8], span(at_s - row.started_s), span(at_s - row.started_s));
  });
  const workflows = Object.entries(runs.workflows).map(([name, count]) => `${name || "unknown"} ${number(count)}`).join(", ");
  $("runs-note").textContent = workflows;
  $("none").hidden = runs.rows.length > 0;
  $("none").textContent = runs.active ? "No run matches." : "No run is in flight. Start some: pbkv submit WORKFLOW";
  const last = runs.offset + runs.rows.length;
  const unlisted = runs.active > runs.listed ? `; the ${number(runs.listed)} oldest of ${number(runs.active)} are listed` : "";
  const said = runs.matched ? `${runs.offset + 1} to ${last} of ${number(runs.matched)}${unlisted}` : "";
  if ($("page").textContent !== said) $("page").textContent = said;
  $("before").disabled = runs.offset === 0;
  $("after").disabled = last >= runs.matched;
  if (!runs.rows.length && runs.offset > 0) turn(-runs.size);
  $("queue").hidden = !queue.pending.length;
  fill($("queue").firstElementChild, [queue.pending.length, queue.more], `${queue.pending.length}${queue.more ? " or more" : ""} wait for a runner`);
  fill($("queue").lastElementChild, queue.pending, queue.pending.map((run) => h("li", {}, h("a", { href: opened(run.run_id) }, run.run_id), ` ${run.workflow} `,
    h("span", { class: "quiet" }, run.queue ? `${run.queue.position ? `number ${number(run.queue.position)}` : "far behind"}: ${run.queue.reason}` : ""))));
}

// The stream tells of runs in flight only: the others are asked for when these have changed.
const ended = { rows: [], of: null, next_s: 0 };
const LATEST = 50, SHOWN = 8, PAUSE_S = 3;

async function showEnded({ runs, at_s }) {
  const of = `${runs.active} ${runs.rows.map((row) => row.run_id).join(" ")}`;
  if (of !== ended.of && at_s >= ended.next_s) {
    Object.assign(ended, { of, next_s: at_s + PAUSE_S });
    const latest = await json(`/v1/runs?limit=${LATEST}`).catch(() => []);
    ended.rows = latest.filter((run) => run.ended_at).sort((one, other) => other.ended_at.localeCompare(one.ended_at)).slice(0, SHOWN);
  }
  $("ended").hidden = !ended.rows.length;
  keyed($("ended-runs").tBodies[0], ended.rows, (run) => run.run_id, (run) => lineOf(run.run_id, 4), (line, run) => {
    const told = [run.workflow ?? "", run.status, run.seconds === undefined ? DASH : span(run.seconds), span(at_s - Date.parse(run.ended_at) / 1000)];
    line.querySelectorAll("td").forEach((cell, at) => fill(cell, told[at], told[at]));
    line.dataset.status = run.status;
  });
}

function turn(by) {
  query.offset = Math.max(0, query.offset + by);
  feed.start();
}

function ask(name, value) {
  query[name] = value;
  query.offset = 0;
  feed.start();
}

let typing = 0;
$("find").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => ask("find", event.target.value.trim()), 250);
});
$("state").addEventListener("change", (event) => ask("state", event.target.value));
$("before").addEventListener("click", () => turn(-50));
$("after").addEventListener("click", () => turn(50));
$("open").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.value.trim()) location.hash = opened(event.target.value.trim()); });
$("filter").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keyIs($("key-value").value.trim());
  $("key-value").value = "";
  feed.start();
});

function route() {
  const run = new URLSearchParams(location.hash.slice(1)).get("run");
  $("overview").hidden = run !== null;
  page.open(run);
  if (run !== null) $("main").focus();
}
addEventListener("hashchange", route);
route();
feed.start();
