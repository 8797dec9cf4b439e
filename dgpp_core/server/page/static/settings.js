// The fields of the settings form, kept in this browser, as members of a request.

import { ServiceError } from "./api.js";
import { $, el, stored } from "./dom.js";

const SETTINGS = "dgpp.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const EXAMPLE = [{ type: "function", function: {
  name: "get_weather",
  description: "The weather of a city now.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
} }];

export class Settings {
  constructor() {
    this.form = $("settings-form");
    const saved = stored(localStorage, SETTINGS, {});
    for (const field of this.form.elements) {
      if (field.name && saved[field.name] !== undefined) field.value = saved[field.name];
    }
    this.effort = saved.reasoning_effort ?? "";
    this.form.addEventListener("input", () => this.#save());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => this.#save()));
    $("tools-example").addEventListener("click", () => {
      this.form.elements.tools.value = JSON.stringify(EXAMPLE, null, 2);
      this.#save();
    });
    this.#check();
  }

  /** Show the model's own values where a field is empty, and the efforts that it has. */
  describe(model) {
    for (const [name, value] of Object.entries(model.sampling.defaults)) {
      const field = this.form.elements[name];
      if (field) field.placeholder = String(Math.round(value * 1e4) / 1e4);
    }
    const efforts = Object.keys(model.reasoning.effort_mapping);
    $("effort-field").hidden = !efforts.length;
    const select = this.form.elements.reasoning_effort;
    select.replaceChildren(select.options[0], ...efforts.map((effort) => el("option", { value: effort }, effort)));
    select.value = efforts.includes(this.effort) ? this.effort : "";
    const tools = this.form.elements.tools;
    tools.disabled = $("tools-example").disabled = !model.tools.available;
    tools.placeholder = model.tools.available ? "" : "This model's chat template has no form for tools that is known here.";
  }

  /** The members of a request. */
  fields() {
    const found = {};
    for (const name of NUMBERS) {
      const field = this.form.elements[name];
      if (!field.checkValidity()) throw new ServiceError(`${field.labels[0].textContent}: ${field.validationMessage}`);
      if (field.value !== "") found[name] = Number(field.value);
    }
    for (const name of ["system", "reasoning_effort"]) {
      const value = this.form.elements[name].value;
      if (value.trim()) found[name] = value;
    }
    const tools = this.form.elements.tools;
    const problem = this.#check();
    if (problem) throw new ServiceError(`Tools: ${problem}`);
    if (tools.value.trim() && !tools.disabled) found.tools = JSON.parse(tools.value);
    return found;
  }

  #save() {
    const values = [...this.form.elements].filter((field) => field.name).map((field) => [field.name, field.value]);
    localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(values)));
    this.#check();
  }

  #check() {
    const field = this.form.elements.tools;
    let problem = "";
    try {
      if (field.value.trim() && !Array.isArray(JSON.parse(field.value))) problem = "an array is expected.";
    } catch (error) {
      problem = `this is not JSON: ${error.message}`;
    }
    field.setAttribute("aria-invalid", String(Boolean(problem)));
    $("tools-error").textContent = problem;
    return problem;
  }
}
