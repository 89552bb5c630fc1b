// A screen, drawn by spice-html5. SPICE has several channels (screen, keys, cursor…), each with a WebSocket of its own.

import { SpiceMainConn, sendCtrlAltDel } from "./spice-html5/main.js";
import { Constants } from "./spice-html5/enums.js";
import { SpiceConn } from "./spice-html5/spiceconn.js";
import { explain, locate, show } from "./common.js";

const LOOK_INTERVAL = 50; // milliseconds
const screen = document.getElementById("screen");
const ctrlAltDel = document.getElementById("ctrl-alt-del");

// The proxy closes every channel with the same reason; the first one is kept.
let reason = "";
window.WebSocket = class extends WebSocket {
  constructor(...given) {
    super(...given);
    this.addEventListener("close", (event) => { reason ||= event.reason; });
  }
};

// The library drops the zeros at the start of an encrypted ticket, and the guest then closes the channel: one connection
// in 64. It writes the ticket from the left into a field of a fixed length, so the zeros must be put back.
const TICKET_LENGTH = Constants.SPICE_TICKET_KEY_PAIR_LENGTH / 8;
const sendTicket = SpiceConn.prototype.send_ticket;
SpiceConn.prototype.send_ticket = function (ticket) {
  sendTicket.call(this, [...Array(TICKET_LENGTH - ticket.length).fill(0), ...ticket]);
};

const address = await locate("spice");
if (address) {
  const spice = new SpiceMainConn({ uri: address.href, screen_id: screen.id });
  let over = false;
  // Without this handler the channels throw errors that nothing catches. A channel that fails ends all of them.
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
  // The library reports when it is connected, not when screen and keyboard are ready.
  const looking = setInterval(() => {
    const canvas = screen.querySelector("canvas");
    if (!canvas || spice.inputs?.state !== "ready") return;
    clearInterval(looking);
    show("connected", "good");
    ctrlAltDel.disabled = false;
    canvas.focus();
  }, LOOK_INTERVAL);
  // The library drops the focus when the mouse leaves the screen.
  screen.addEventListener("mouseout", (event) => event.target.focus());
  ctrlAltDel.addEventListener("click", () => {
    sendCtrlAltDel(spice);
    screen.querySelector("canvas")?.focus();
  });
}
