// One run: its calls, what each found in which tier, and why it did not find the rest.

import { json } from "./feed.js";
import { bar, brief, fill, h, letters, number, percent, span, tint } from "./draw.js";

const CAUSES = {
  never_cached: "new: nobody had computed it here",
  evicted: "evicted before it was used again",
  retired: "was of runs that had ended",
  demoted: "had moved to the host tier, loaded from there",
  salt: "cached, but for another tenant",
  other_replica: "computed on another replica",
};
const AGAIN_MS = 3000;

export class RunPage {
  constructor(node) {
    this.node = node;
    this.run = null;
    this.timer = 0;
  }

  open(run) {
    clearTimeout(this.timer);
    this.node.hidden = run === null;
    if (run === this.run) return;
    this.run = run;
    this.row = null;
    this.node.dataset.was = "";
    if (run === null) return;
    this.node.replaceChildren(h("p", { class: "quiet" }, "Loading."));
    this.load();
  }

  heard({ runs, at_s }) {
    const row = runs.rows.find((one) => one.run_id === this.run);
    if (row) this.row = { ...row, at_s };
  }

  async load() {
    const run = this.run, path = `/v1/runs/${encodeURIComponent(run)}`;
    const [about, calls, kv] = await Promise.all([path, `${path}/calls`, `${path}/kv`].map((one) => json(one).catch((error) => ({ error }))));
    if (run !== this.run) return;
    this.show(about, calls.error ? [] : calls, kv.error ? null : kv);
    const ended = about.error || !["pending", "running"].includes(about.status);
    if (!ended) this.timer = setTimeout(() => this.load(), AGAIN_MS);
  }

  show(about, calls, kv) {
    const seen = new Map((kv?.calls ?? []).map((call) => [call.order, call]));
    const known = about.error ? null : about;
    const back = h("p", {}, h("a", { href: "#" }, "\u2190 All runs"));
    const title = h("h2", { id: "run-title" }, h("span", { class: `piece ${tint(this.run)}`, "aria-hidden": true }, letters(this.run)), " ", this.run);
    const facts = known
      ? [
          ["workflow", known.workflow ?? this.row?.workflow],
          ["status", known.status],
          ["started", known.started_at && `${known.started_at.replace("T", " ").slice(0, 19)} UTC`],
          ["took", known.seconds !== undefined ? span(known.seconds) : null],
          ["attempt", known.attempt > 1 ? known.attempt : null],
          ["calls", calls.length],
          ["error", known.error ? `${known.error.error}: ${known.error.message}` : null],
        ]
      : this.row ? [["workflow", this.row.workflow], ["state", this.row.state], ["calls", this.row.calls]] : [];
    const list = h("dl", { class: "facts" }, facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
    const trouble = about.error ? h("p", { class: "note" }, this.row ? "This run is of a foreign harness: its calls are counted, not kept." : about.error.message) : null;
    const body = calls.length ? this.calls(calls, seen, kv) : about.error ? null : h("p", { class: "quiet" }, "It has made no LLM call yet.");
    fill(this.node, [about, calls, kv, about.error?.message, this.row?.calls], back, title, list, trouble, body);
  }

  calls(calls, seen, kv) {
    const sums = calls.reduce((all, call) => ({ prompt: all.prompt + call.prompt_tokens, device: all.device + call.device_cached_tokens, host: all.host + call.host_cached_tokens }), { prompt: 0, device: 0, host: 0 });
    const share = (tokens) => (sums.prompt ? percent(tokens / sums.prompt) : "0 %");
    const head = ["Call", "Agent", "Replica", "Took", "Output", "Prompt", "What the prompt found", "Why not the rest"].map((name, at) => h("th", { scope: "col", class: at > 2 && at < 6 ? "n" : null }, name));
    const table = h("table", { id: "calls" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, calls.map((call) => this.call(call, seen.get(call.order)))));
    return [
      h("p", {}, `${number(sums.prompt)} prompt tokens in ${calls.length === 1 ? "one call" : `${number(calls.length)} calls`}: ${share(sums.device)} found in the device tier, ${share(sums.host)} in the host tier, ${share(sums.prompt - sums.device - sums.host)} computed.`),
      kv === null ? h("p", { class: "note" }, "Causes of misses are not reported by this server.") : null,
      h("div", { class: "wide" }, table),
      h("ul", { class: "legend", "aria-label": "Meaning of the bars" }, [["device", "found in the device tier"], ["host", "loaded from the host tier"], ["lost", "computed again"], ["new", "computed, new"]].map(([kind, text]) => h("li", {}, h("span", { class: `piece ${kind}` }), text))),
    ];
  }

  call(call, cache) {
    const device = call.device_cached_tokens, host = call.host_cached_tokens, prompt = call.prompt_tokens;
    const missed = cache?.missed ?? null;
    const anew = (missed ?? []).filter((one) => one.cause !== "demoted" && one.cause !== "never_cached").reduce((sum, one) => sum + one.end - one.start, 0);
    const lost = Math.min(anew, prompt - device - host);
    const parts = [
      { tokens: device, kind: "device", title: `device: ${number(device)}` },
      { tokens: host, kind: "host", title: `host: ${number(host)}` },
      { tokens: lost, kind: "lost", title: `computed again: ${number(lost)}` },
      { tokens: prompt - device - host - lost, kind: "new", title: `new: ${number(prompt - device - host - lost)}` },
    ];
    const told = `${number(device)} device, ${number(host)} host, ${number(prompt - device - host)} computed`;
    const why = missed === null
      ? h("span", { class: "quiet" }, "not reported")
      : missed.length
        ? h("ul", { class: "spans" }, missed.map((one) => this.span(one)))
        : h("span", { class: "quiet" }, "found all");
    const route = cache?.routed?.reason;
    return h("tr", {}, h("th", { scope: "row" }, `${call.order ?? ""}`), h("td", {}, call.agent, h("small", { class: "quiet" }, ` step ${call.step}`)),
      h("td", { title: call.replica }, (call.replica ?? "").split("#").at(-1).slice(0, 10), route ? h("small", { class: "quiet" }, ` ${route}`) : null),
      h("td", { class: "n" }, call.seconds === undefined ? "" : `${brief(call.seconds)} s`), h("td", { class: "n" }, number(call.output_tokens)), h("td", { class: "n" }, number(prompt)),
      h("td", { class: "found" }, bar(`call ${call.order} by ${call.agent}: ${told} of ${number(prompt)} tokens`, parts, Math.max(1, prompt)), h("small", {}, told)),
      h("td", {}, why));
  }

  span(one) {
    const when = one.at_s ? `, at ${new Date(one.at_s * 1000).toTimeString().slice(0, 8)}` : "";
    const score = one.score !== undefined && one.score !== null ? `, score ${one.score.toPrecision(2)}` : "";
    const by = { scored: ", by score", recency: ", by recency" }[one.reason] ?? "";
    const where = one.replica ? ` (${one.replica.split("#").at(-1).slice(0, 10)})` : "";
    return h("li", { "data-cause": one.cause }, h("b", {}, one.cause.replace("_", " ")), ` ${number(one.start)} to ${number(one.end)} `,
      h("span", { class: "quiet" }, `${CAUSES[one.cause] ?? ""}${where}${by}${score}${when}`));
  }
}
