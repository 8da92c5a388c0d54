// Talks to the server: JSON with the key, and a stream of snapshots that reconnects. Knows nothing of the page.

const KEY = "pbkv-api-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const keyIs = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(path, { ...options, headers: key ? { "x-api-key": key } : {}, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, body.detail || `the server answered ${answer.status}`);
}

export const json = async (path) => (await ask(path)).json();

// EventSource cannot send a header; the format is simple enough to read here.
async function* events(path, signal) {
  const answer = await ask(path, { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}

// `path` is asked anew at every connection. heard(snapshot); lost(error, seconds until the next try); refused(error).
export class Feed {
  constructor({ path, heard, lost, refused }) {
    Object.assign(this, { path, heard, lost, refused });
    this.turn = 0;
  }

  stop() {
    this.turn += 1;
    this.control?.abort();
  }

  async start() {
    this.stop();
    const turn = this.turn;
    let pause = 1;
    while (turn === this.turn) {
      this.control = new AbortController();
      try {
        for await (const snapshot of events(this.path(), this.control.signal)) {
          if (turn !== this.turn) return;
          pause = 1;
          this.heard(snapshot);
        }
      } catch (error) {
        if (turn !== this.turn) return;
        if (error.status === 401) return this.refused(error);
        this.lost(error, pause);
      }
      await new Promise((done) => setTimeout(done, pause * 1000));
      pause = Math.min(15, pause * 2);
    }
  }
}
