// The conversation: what was said, what is asked, and the reply as it comes.

import { events, request, ServiceError } from "./api.js";
import { $, stored } from "./dom.js";
import { Follow, ReplyView, userView } from "./view.js";

const CHAT = "dgpp.chat";

export class Chat {
  /** `settings()` are the fields of a request, and throws where they are wrong; `onRefused()` asks for a key. */
  constructor({ settings, onRefused }) {
    this.settings = settings;
    this.onRefused = onRefused;
    this.model = "";
    this.messages = stored(sessionStorage, CHAT, []);
    this.views = [];
    this.running = null;
    this.follow = new Follow();
    this.#showAll();
  }

  /** Say something and have it answered. */
  say(text) {
    this.messages.push({ role: "user", content: text });
    this.#showAll();
    return this.#answer();
  }

  /** End the reply that comes. */
  stop() {
    this.running?.abort();
  }

  /** Begin anew. */
  clear() {
    this.stop();
    this.messages = [];
    this.#showAll();
  }

  #retry() {
    this.messages.pop();
    return this.#answer();
  }

  #results(texts) {
    this.messages.at(-1).calls.forEach((call, at) => (call.result = texts[at]));
    return this.#answer();
  }

  async #answer() {
    if (this.running) return;
    const reply = { role: "assistant", content: "", reasoning: "", calls: [], live: true, error: null };
    const asked = turns(this.messages);
    this.messages.push(reply);
    this.#showAll();
    this.follow.end();
    const control = (this.running = new AbortController());
    this.#busy(true);
    const began = performance.now();
    try {
      await this.#stream(reply, asked, control.signal, began);
    } catch (error) {
      this.#failed(reply, error);
    } finally {
      reply.live = false;
      reply.totalMs = performance.now() - began;
      if (this.running === control) this.running = null;
      this.#busy(false);
      this.#showAll();
      $("announce").textContent = reply.error ? `Error: ${reply.error.message}` : "The reply is complete.";
    }
  }

  async #stream(reply, asked, signal, began) {
    const fields = this.settings();
    const system = fields.system ? [{ role: "system", content: fields.system }] : [];
    delete fields.system;
    const body = { model: this.model, messages: [...system, ...asked], stream: true,
      stream_options: { include_usage: true, include_obfuscation: false }, ...fields };
    const response = await request("/v1/chat/completions", { body, signal });
    for await (const chunk of events(response)) {
      if (chunk.usage) reply.usage = chunk.usage;
      for (const { delta, finish_reason } of chunk.choices) {
        if (finish_reason) reply.finish = finish_reason;
        this.#take(reply, delta, performance.now() - began);
      }
      this.#later();
    }
  }

  #take(reply, delta, ms) {
    if (delta.reasoning_content) {
      reply.firstMs ??= ms;
      reply.reasoning += delta.reasoning_content;
      reply.thoughtMs = ms - reply.firstMs;
    }
    if (delta.content) {
      reply.firstMs ??= ms;
      reply.content += delta.content;
    }
    for (const part of delta.tool_calls ?? []) {
      reply.firstMs ??= ms;
      const call = (reply.calls[part.index] ??= { id: "", name: "", arguments: "", custom: part.type === "custom" });
      const said = part.function ?? part.custom ?? {};
      call.id ||= part.id ?? "";
      call.name += said.name ?? "";
      call.arguments += said.arguments ?? said.input ?? "";
    }
  }

  #failed(reply, error) {
    if (error.name === "AbortError") {
      reply.finish = "stopped";
      return;
    }
    const known = error instanceof ServiceError;
    reply.error = { message: known ? error.message : `The page failed: ${error.message}`, code: error.code ?? "" };
    if (error.status === 401) this.onRefused();
  }

  /** Show what came, at most once a frame. */
  #later() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.views.at(-1)?.update?.(true);
      this.follow.update();
    });
  }

  #showAll() {
    const list = $("messages");
    $("welcome").hidden = this.messages.length > 0;
    this.messages.forEach((message, at) => {
      const last = at === this.messages.length - 1;
      if (this.views[at]?.message === message) {
        this.views[at].update?.(last);
        return;
      }
      const view = message.role === "user" ? { message, element: userView(message) } : this.#reply(message, last);
      if (this.views[at]) this.views[at].element.replaceWith(view.element);
      else list.append(view.element);
      this.views[at] = view;
    });
    while (this.views.length > this.messages.length) this.views.pop().element.remove();
    this.follow.update();
    try {
      sessionStorage.setItem(CHAT, JSON.stringify(this.messages.map((message) => ({ ...message, live: false }))));
    } catch {
      sessionStorage.removeItem(CHAT); // too long to be kept: it lives as long as the page
    }
  }

  #reply(message, last) {
    const view = new ReplyView(message, { retry: () => this.#retry(), results: (texts) => this.#results(texts) });
    view.update(last);
    return view;
  }

  #busy(busy) {
    $("send").hidden = busy;
    $("stop").hidden = !busy;
  }
}

/** The messages as a request has them. Replies of which nothing came are left out, and calls that nobody answered. */
function turns(messages) {
  return messages.flatMap((message) => {
    if (message.role === "user") return [{ role: "user", content: message.content }];
    const calls = message.calls.filter((call) => call.result !== undefined);
    if (!message.content && !calls.length) return [];
    const turn = { role: "assistant", content: message.content || null };
    if (message.reasoning) turn.reasoning_content = message.reasoning;
    if (calls.length) turn.tool_calls = calls.map(written);
    const results = calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }));
    return [turn, ...results];
  });
}

function written(call) {
  return call.custom
    ? { id: call.id, type: "custom", custom: { name: call.name, input: call.arguments } }
    : { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } };
}
