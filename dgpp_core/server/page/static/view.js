// One message of the conversation as an element that follows it while it grows.

import { $, count, el, sentence } from "./dom.js";
import { blocks, copyText, render } from "./markdown.js";

const FINISHES = { length: "cut off at the token limit", stopped: "stopped" };

/** Text as blocks; only those that changed are made anew. */
class Prose {
  constructor() {
    this.element = el("div", { class: "prose" });
    this.shown = [];
  }

  update(text) {
    const wanted = blocks(text);
    wanted.forEach((block, at) => {
      if (this.shown[at] === block) return;
      const made = render(block);
      if (at < this.element.children.length) this.element.children[at].replaceWith(made);
      else this.element.append(made);
    });
    while (this.element.children.length > wanted.length) this.element.lastChild.remove();
    this.shown = wanted;
  }
}

/** A message of the reader. */
export function userView(message) {
  const body = el("div", { class: "bubble" }, message.content);
  return el("li", { class: "message user" }, el("h2", { class: "hidden" }, "You"), body);
}

/** A reply: reasoning folded, text, calls with a place for their results, and what it cost. */
export class ReplyView {
  /** `actions.retry()` asks again, `actions.results(texts)` answers the calls. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.prose = new Prose();
    this.thoughts = el("div", { class: "thoughts" });
    this.summary = el("summary");
    this.reasoning = el("details", { class: "reasoning" }, this.summary, this.thoughts);
    this.calls = el("div", { class: "calls" });
    this.error = el("div", { class: "notice bad", role: "alert" });
    this.waiting = el("p", { class: "waiting", "aria-hidden": "true" }, el("span"), el("span"), el("span"));
    this.foot = el("div", { class: "foot" });
    this.element = el("li", { class: "message reply" }, el("h2", { class: "hidden" }, "Model"), this.reasoning,
      this.prose.element, this.calls, this.error, this.waiting, this.foot);
    this.cards = [];
    this.update(true);
  }

  /** `last`: nothing follows this message, so that it may be asked again or its calls answered. */
  update(last) {
    const { content, reasoning, calls, error, live } = this.message;
    this.#reason(reasoning, live && !content && !calls.length);
    this.prose.update(content);
    while (this.cards.length < calls.length) {
      this.cards.push(new CallCard());
      this.calls.append(this.cards.at(-1).element);
    }
    calls.forEach((call, at) => this.cards[at].update(call, live, last));
    this.error.hidden = !error;
    if (error && this.error.dataset.text !== error.message) this.#fail(error);
    this.waiting.hidden = !live || Boolean(content || reasoning || calls.length);
    this.element.classList.toggle("live", live);
    this.element.setAttribute("aria-busy", String(live));
    if (live) this.foot.replaceChildren();
    else this.#close(last);
  }

  #reason(text, thinking) {
    this.reasoning.hidden = !text;
    if (!text) return;
    if (this.thoughts.textContent.length !== text.length) this.thoughts.textContent = text;
    const { thoughtMs } = this.message;
    this.summary.textContent = thinking ? "Thinking …" : thoughtMs ? `Thought for ${seconds(thoughtMs)}` : "Reasoning";
    this.reasoning.classList.toggle("thinking", thinking);
  }

  #fail({ message, code }) {
    this.error.dataset.text = message;
    this.error.replaceChildren(el("strong", {}, "No complete reply. "), sentence(message), code ? el("code", {}, code) : "");
  }

  #close(last) {
    const copy = el("button", { type: "button", class: "quiet small" }, "Copy");
    copy.addEventListener("click", () => copyText(this.message.content, copy));
    const parts = this.message.content ? [copy] : [];
    const waits = last && this.message.calls.some((call) => call.result === undefined);
    if (waits && !this.message.error) {
      const send = el("button", { type: "button", class: "primary small" }, "Send results");
      send.addEventListener("click", () => this.actions.results(this.cards.map((card) => card.result())));
      parts.unshift(send);
    }
    if (last) {
      const retry = el("button", { type: "button", class: "quiet small" }, "Try again");
      retry.addEventListener("click", () => this.actions.retry());
      parts.push(retry);
    }
    const state = waits ? "waits for results" : (FINISHES[this.message.finish] ?? "");
    const line = [state, ...cost(this.message)].filter(Boolean).join(" · ");
    this.foot.replaceChildren(...parts, el("span", { class: "cost" }, line));
  }
}

/** A call: its name, its arguments, and its result once there is one. */
class CallCard {
  constructor() {
    this.name = el("code", { class: "call-name" });
    this.state = el("span", { class: "note" });
    this.arguments = el("pre", { tabindex: "0" });
    this.field = el("textarea", { rows: "2", class: "mono", placeholder: "What the tool returned" });
    this.answer = el("label", { class: "call-answer" }, "Result", this.field);
    this.given = el("pre", { tabindex: "0" });
    this.result_ = el("div", { class: "call-result" }, el("span", { class: "note" }, "Result"), this.given);
    this.element = el("section", { class: "call", "aria-label": "Tool call" },
      el("div", { class: "call-head" }, el("span", { class: "tag" }, "Tool call"), this.name, this.state),
      this.arguments, this.answer, this.result_);
  }

  update(call, live, last) {
    this.name.textContent = call.name;
    this.state.textContent = live ? "being written …" : "";
    this.arguments.textContent = live ? call.arguments : pretty(call.arguments);
    this.answer.hidden = live || !last || call.result !== undefined;
    this.result_.hidden = call.result === undefined;
    this.given.textContent = call.result ?? "";
  }

  result() {
    return this.field.value;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function seconds(ms) {
  if (ms < 950) return `${Math.round(ms)} ms`;
  return ms < 9950 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;
}

/** What a reply cost. */
function cost({ usage, firstMs, totalMs }) {
  const parts = [];
  if (usage) {
    parts.push(`${count(usage.completion_tokens)} tokens`);
    const tail = totalMs - firstMs;
    if (usage.completion_tokens > 1 && tail > 0) {
      parts.push(`${((1000 * (usage.completion_tokens - 1)) / tail).toFixed(1)} a second`);
    }
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} of it cached` : ""}`);
  }
  if (firstMs) parts.push(`first after ${seconds(firstMs)}`);
  return parts;
}

/** Keeps the end of the conversation in view, unless the reader has scrolled away from it. */
export class Follow {
  constructor() {
    this.box = $("scroll");
    this.button = $("to-end");
    this.on = true;
    this.box.addEventListener("scroll", () => {
      this.on = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 60;
      this.button.hidden = this.on;
    }, { passive: true });
    this.button.addEventListener("click", () => this.end());
  }

  update() {
    if (this.on) this.box.scrollTop = this.box.scrollHeight;
  }

  end() {
    this.on = true;
    this.update();
  }
}
