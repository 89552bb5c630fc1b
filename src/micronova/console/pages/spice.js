// A screen, drawn by spice-html5. SPICE has several channels (screen, keys, cursor…), each with a WebSocket of its own.

import { SpiceMainConn, sendCtrlAltDel } from "./spice-html5/main.js";
import { SpiceConn } from "./spice-html5/spiceconn.js";
import { explain, locate, show } from "./common.js";

const LOOK_INTERVAL = 50; // milliseconds
const screen = document.getElementById("screen");
const ctrlAltDel = document.getElementById("ctrl-alt-del");

// The proxy says why it closes, on every channel; whichever closes first has said it for all.
let reason = "";
window.WebSocket = class extends WebSocket {
  constructor(...given) {
    super(...given);
    this.addEventListener("close", (event) => { reason ||= event.reason; });
  }
};

const address = await locate("spice");
if (address) {
  const spice = new SpiceMainConn({ uri: address.href, screen_id: screen.id });
  let over = false;
  // The channels have this from here: without it they throw what goes wrong at nobody. One that fails ends them all.
  SpiceConn.prototype.onerror = () => {
    if (over) return;
    over = true;
    spice.stop();
  };
  spice.ws.addEventListener("close", (event) => {
    over = true;
    clearInterval(looking);
    ctrlAltDel.disabled = true;
    explain(event.reason || reason, "Perhaps it was opened in another window.");
  });
  // The library tells when it is connected, not when it can be looked at and typed into.
  const looking = setInterval(() => {
    const canvas = screen.querySelector("canvas");
    if (!canvas || spice.inputs?.state !== "ready") return;
    clearInterval(looking);
    show("connected", "good");
    ctrlAltDel.disabled = false;
    canvas.focus();
  }, LOOK_INTERVAL);
  // The library lets the keys go elsewhere when the mouse is not over the screen.
  screen.addEventListener("mouseout", (event) => event.target.focus());
  ctrlAltDel.addEventListener("click", () => {
    sendCtrlAltDel(spice);
    screen.querySelector("canvas")?.focus();
  });
}
