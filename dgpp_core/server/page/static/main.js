// The page: its parts, its dialogs, its keys.

import { apiKey, request } from "./api.js";
import { Chat } from "./chat.js";
import { $, count } from "./dom.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";

const THEMES = { "": "Theme: auto", light: "Theme: light", dark: "Theme: dark" };

const settings = new Settings();
const chat = new Chat({ settings: () => settings.fields(), onRefused: () => askForKey(true) });
const status = new Status({ onHealth: health, onRefused: () => askForKey(true) });

function health(state, text) {
  const before = $("health").dataset.state;
  if ($("health-text").textContent !== text) $("health-text").textContent = text;
  $("health").dataset.state = state;
  if (state === "good" && (before !== "good" || !chat.model)) describe();
}

async function describe() {
  try {
    const [model] = (await (await request("/v1/models")).json()).data;
    chat.model = model.id;
    $("model").textContent = $("model").title = model.id;
    document.title = `${model.id} - dgpp`;
    const able = [model.tools.available && "calls tools", Object.keys(model.reasoning.effort_mapping).length && "reasons"];
    const facts = [`Up to ${count(model.context.request_limit_tokens)} tokens a conversation`, ...able.filter(Boolean)];
    $("facts").textContent = `${model.id}. ${facts.join(", ")}.`;
    settings.describe(model);
  } catch {
    chat.model = ""; // the status view says what is wrong, and asks again
  }
}

// The composer

const prompt = $("prompt");

function send() {
  const text = prompt.value.trim();
  if (!text || chat.running) return;
  prompt.value = "";
  fit();
  chat.say(text);
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
$("new-chat").addEventListener("click", () => {
  chat.clear();
  prompt.focus();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    prompt.value = example.textContent;
    send();
  });
}

// The panel

const tabs = [$("tab-status"), $("tab-settings")];

function show(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !chosen;
  }
}

for (const [at, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const next = tabs[1 - at];
    show(next);
    next.focus();
  });
}

function panel(open) {
  document.body.classList.toggle("panel-shown", open);
  $("panel-open").setAttribute("aria-expanded", String(open));
  (open ? tabs.find((tab) => tab.tabIndex === 0) : $("panel-open")).focus();
}

const panelIsOpen = () => document.body.classList.contains("panel-shown");
$("panel-open").addEventListener("click", () => panel(!panelIsOpen()));
$("panel-close").addEventListener("click", () => panel(false));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  if (chat.running) chat.stop();
  else if (panelIsOpen()) panel(false);
});

// Colours

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = THEMES[name];
  localStorage.setItem("dgpp.theme", name);
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
theme(localStorage.getItem("dgpp.theme") in THEMES ? localStorage.getItem("dgpp.theme") : "");

// The API key

function keyState() {
  $("key-state").textContent = apiKey.get() ? "Requests show the key that you entered." : "No key is entered.";
  $("key-change").textContent = apiKey.get() ? "Change or remove the key" : "Enter a key";
}

function askForKey(refused) {
  if ($("key-dialog").open) return;
  $("key-why").textContent = refused && apiKey.get()
    ? "The service does not know the key that you entered." : "Requests to this service must show one of its keys.";
  $("key-form").elements.key.value = refused ? "" : apiKey.get();
  $("key-dialog").showModal();
}

$("key-change").addEventListener("click", () => askForKey(false));
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", () => {
  const { key, keep } = $("key-form").elements;
  apiKey.set(key.value.trim(), keep.checked);
  keyState();
  status.resume();
});
keyState();
fit();
prompt.focus();
