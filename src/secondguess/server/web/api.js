// The server's API: what it serves, and answers as streams of events.

let key = sessionStorage.getItem("key") ?? "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("key", given);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? response.statusText);
}

// What is served, and how.
export async function serverInfo() {
  return (await call("server_info")).json();
}

// The events of a streamed chat, with what was drafted for it.
export async function* chatEvents(request, signal) {
  const stream_options = { include_usage: true, continuous_usage_stats: true, drafting: true };
  const body = JSON.stringify({ ...request, stream: true, stream_options });
  const response = await call("v1/chat/completions", { method: "POST", body, signal });
  for await (const data of dataOf(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(0, event.error.message);
    yield event;
  }
  throw new ApiError(0, "the connection broke");
}

// The data of server-sent events, each of one line.
async function* dataOf(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.slice("data: ".length);
  }
}
