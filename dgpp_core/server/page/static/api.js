// Requests to the service: its API key, its errors, its streams.

const KEY = "dgpp.key";

/** An error that can be shown to the reader; `status` is 0 where no answer came. */
export class ServiceError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

export const apiKey = {
  get() {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  },
  /** Without `keep` the key is forgotten with the tab. */
  set(key, keep) {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (key) (keep ? localStorage : sessionStorage).setItem(KEY, key);
  },
};

/** The response to a request that succeeded. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey.get();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The service cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const status = response.status;
  try {
    return asError((await response.json()).error, status);
  } catch {
    return new ServiceError(`The service answered with status ${status}.`, { status });
  }
}

function asError(error, status) {
  return new ServiceError(error.message, { status, code: error.code, param: error.param });
}

/** The parsed events of a stream, up to its end mark. A stream that lacks it was cut. */
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServiceError("The connection was lost before the reply was complete.");
      }
      if (part.done) throw new ServiceError("The stream ended before the reply was complete.");
      rest += decoder.decode(part.value, { stream: true });
      const found = rest.split("\n\n");
      rest = found.pop();
      for (const event of found) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw asError(chunk.error, 200);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
