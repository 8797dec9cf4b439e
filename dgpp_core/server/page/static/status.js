// The live view: what the metrics route says, once a second while somebody looks.

import { request } from "./api.js";
import { $, count, el, percent, sentence } from "./dom.js";

const EVERY_MS = 1000;
const SAMPLES = 60;

export class Status {
  /** `onHealth(state, text)` hears "good", "bad" or "lost"; `onRefused()` asks for a key. */
  constructor({ onHealth, onRefused }) {
    this.onHealth = onHealth;
    this.onRefused = onRefused;
    this.rates = [];
    this.before = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.resume()));
    this.resume();
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = 0;
  }

  resume() {
    this.pause();
    this.timer = setTimeout(() => this.#look());
  }

  async #look() {
    try {
      const found = await (await request("/metrics")).json();
      this.#show(found);
    } catch (error) {
      this.before = null;
      this.#problem(error);
      if (error.status === 401) {
        this.onRefused();
        return; // asked again once there is a key
      }
    }
    this.pause();
    if (!document.hidden) this.timer = setTimeout(() => this.#look(), EVERY_MS);
  }

  #problem(error) {
    const text = error.status === 401 ? "needs a key" : error.status ? "fault" : "unreachable";
    this.onHealth("bad", text);
    $("status-error").hidden = false;
    $("status-error").textContent = error.status === 401 ? "The service wants an API key." : sentence(error.message);
  }

  #show({ scheduler, service, prefix_cache: cache, prefill }) {
    const failed = service.engine_failed;
    $("status-error").hidden = !failed;
    if (failed) $("status-error").textContent = "The engine has failed; the service is about to end.";
    const running = scheduler.active + scheduler.prefilling;
    this.onHealth(failed ? "bad" : "good", failed ? "engine failed" : running ? `${running} running` : "ready");
    this.#rate(scheduler.tokens_generated);
    $("slots").textContent = `${running} of ${scheduler.slots}`;
    $("slots-note").textContent = scheduler.prefilling ? `${scheduler.prefilling} reading` : "";
    $("queue").textContent = count(scheduler.queued);
    $("queue-note").textContent = service.queue_limit ? `of ${count(service.queue_limit)}` : "";
    this.#memory(scheduler, cache);
    this.#drafts(scheduler.spec_decode);
    this.#prompts(prefill.requests);
    $("done").textContent = count(scheduler.requests_finished);
    $("left").textContent = count(service.requests_cancelled);
    $("shed").textContent = count(service.requests_shed);
    $("rejected").textContent = count(service.rejects_bad);
    $("failed").textContent = count(service.requests_failed);
  }

  #rate(tokens) {
    const now = performance.now();
    if (this.before && tokens >= this.before.tokens) {
      const rate = (1000 * (tokens - this.before.tokens)) / (now - this.before.now);
      this.rates = [...this.rates, rate].slice(-SAMPLES);
      $("rate").textContent = rate < 10 && rate > 0 ? rate.toFixed(1) : count(rate);
    }
    this.before = { tokens, now };
    const most = Math.max(1, ...this.rates);
    const points = this.rates.map((rate, at) => {
      const x = 120 - (120 * (this.rates.length - 1 - at)) / (SAMPLES - 1);
      return `${x.toFixed(1)},${(31 - (29 * rate) / most).toFixed(1)}`;
    });
    const [area, line] = $("spark").children;
    line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
    area.setAttribute("d", points.length > 1 ? `M${points.join("L")}L120,32L${points[0].split(",")[0]},32Z` : "");
  }

  #memory(scheduler, cache) {
    const total = scheduler.pool_blocks_total;
    const used = scheduler.pool_blocks_in_use - cache.blocks_cached;
    const [held, kept] = $("kv").children;
    held.style.width = `${total ? (100 * used) / total : 0}%`;
    kept.style.width = `${total ? (100 * cache.blocks_cached) / total : 0}%`;
    const text = `${percent(used, total)} held, ${percent(cache.blocks_cached, total)} kept`;
    $("kv").setAttribute("aria-label", `KV cache: ${text}, of ${count(total)} blocks`);
    $("kv-text").textContent = total ? `${text}, ${count(total)} blocks` : "";
    $("cache-hits").textContent = `${count(cache.hits)} of ${count(cache.hits + cache.misses)}`;
    const asked = cache.tokens_saved + scheduler.prompt_tokens_computed;
    const share = asked ? ` (${percent(cache.tokens_saved, asked)})` : "";
    $("cache-saved").textContent = count(cache.tokens_saved) + share;
    $("cache-evicted").textContent = count(cache.evictions);
  }

  #drafts(drafts) {
    const drafted = drafts.num_draft_tokens_per_pos_total;
    const accepted = drafts.num_accepted_tokens_per_pos_total;
    const some = drafts.num_draft_tokens_total > 0;
    $("drafts-off").hidden = some;
    $("drafts-text").textContent = some
      ? `${percent(drafts.num_accepted_tokens_total, drafts.num_draft_tokens_total)} of them stood` : "";
    const places = drafted.flatMap((tried, at) => (tried ? [[at, tried]] : []));
    $("drafts").replaceChildren(...places.map(([at, tried]) =>
      el("div", {}, el("dt", {}, `Place ${at + 1}`), meter(accepted[at], tried, "accepted"),
        el("dd", {}, percent(accepted[at], tried)))));
  }

  #prompts(requests) {
    $("prefill-off").hidden = requests.length > 0;
    $("prefill").replaceChildren(...requests.map((item) =>
      el("li", {}, el("span", {}, `Slot ${item.slot}`), meter(item.processed_tokens, item.prompt_tokens, "read"),
        el("span", { class: "note" }, `${count(item.processed_tokens)} of ${count(item.prompt_tokens)} tokens` +
          (item.cached_tokens ? `, ${count(item.cached_tokens)} cached` : "")))));
  }
}

function meter(value, most, what) {
  return el("progress", { max: most, value, "aria-label": `${what}: ${percent(value, most)}` });
}
